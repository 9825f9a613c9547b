// Presets of section 8 as data.  V is affine-token(levels=4,group=D), sinks and recent 0, block 64 or G where not named.
// chanmix and pmkvq need kvq_recipe_data: their profile and budgets do not fit a text.
#include "recipe/presets.h"

#include <iterator>

#include "recipe/recipe.h"

namespace kvq {

namespace {

struct Preset {
  const char *name, *text;
};

constexpr Preset kPresets[] = {
    {"fp16", "k=raw;v=raw"},
    {"kivi-2", "k=affine-channel(levels=4,group=128);v=affine-token(levels=4,group=fit128);block=128"},
    {"kivi-2-g32", "k=affine-channel(levels=4,group=32);v=affine-token(levels=4,group=fit32);block=32;recent=96"},
    {"polar-2", "k=polar(radius=4,angle=4,group=128);block=128"},
    {"chanmix", "k=channel-widths(group=128,params=e4m3,unit=channel);block=128;policy=chanmix"},
    {"kitty", "k=kitty(boost=1/32,group=128);sinks=32;block=128"},
    {"pnmix",
     "k=pair-mix(low=1,high=3,group=128,midpoint=1);v=affine-token(levels=4,group=fit128);sinks=32;block=128;"
     "policy=pnmix(r=1/2)"},
    {"pnmix-g64",
     "k=pair-mix(low=1,high=3,group=64,midpoint=1);v=affine-token(levels=4,group=fit128);sinks=32;block=128;"
     "policy=pnmix(r=2/5)"},
    {"tq-2", "k=lloyd(levels=4);v=lloyd(levels=4)"},
    {"tq-3", "k=lloyd(levels=8);v=lloyd(levels=8)"},
    {"tq-4", "k=lloyd(levels=16);v=lloyd(levels=16)"},
    {"tq-1.585", "k=lloyd(levels=3);v=lloyd(levels=3)"},
    {"tq-2.322", "k=lloyd(levels=5);v=lloyd(levels=5)"},
    {"tq-2.585", "k=lloyd(levels=6);v=lloyd(levels=6)"},
    {"tq-split", "k=channel-split(high=8,low=4);v=channel-split(high=8,low=4);policy=channel-split(r=1/2)"},
    {"semkv", "policy=semkv(r=1/4,low=affine-token(levels=5,group=D,rotate=1),high=affine-token(levels=6,group=D,rotate=1))"},
    {"semkv-tq", "policy=semkv(r=1/4,low=lloyd(levels=5),high=lloyd(levels=6))"},
    {"semkv-tq-2", "policy=semkv(r=3/4,low=lloyd(levels=3),high=lloyd(levels=4))"},
    {"blockgtq-k3v3", "k=width-groups;v=lloyd(levels=8);policy=blockgtq(avg=3)"},
    {"blockgtq-k3v2", "k=width-groups;v=lloyd(levels=4);policy=blockgtq(avg=3)"},
    {"blockgtq-k2v2", "k=width-groups;v=lloyd(levels=4);policy=blockgtq(avg=2)"},
    {"blockgtq-k3v3-fast",
     "k=width-groups(params=e5m3,center=1);v=lloyd(levels=8,params=e5m3);sinks=4;recent=32;"
     "policy=blockgtq(avg=3,bmax=6,score=q-geo,unit=fit16)"},
    {"blockgtq-k2v2-fast",
     "k=width-groups(params=e5m3,center=1);v=lloyd(levels=4,params=e5m3);sinks=4;recent=32;"
     "policy=blockgtq(avg=2,bmax=6,score=q-geo,unit=fit16)"},
    {"pmkvq", "k=progressive(bits=16);v=progressive(bits=16);policy=pmkvq"},
    {"kvq-2",
     "k=channel-widths(group=128,midpoint=1);v=lloyd(levels=3,params=e5m3);sinks=32;recent=32;block=128;"
     "policy=pair-widths(avg=2,bmin=1,bmax=4,score=q-var,unit=fit16)"},
    {"kvq-2.5",
     "k=channel-widths(group=128,midpoint=1);v=lloyd(levels=4,params=e5m3);sinks=32;recent=32;block=128;"
     "policy=pair-widths(avg=21/8,bmin=0,bmax=6,score=q-var,unit=fit16)"},
    {"kvq-3",
     "k=channel-widths(group=128,midpoint=1);v=lloyd(levels=6,params=e5m3);sinks=32;recent=32;block=128;"
     "policy=pair-widths(avg=3,bmin=0,bmax=6,score=q-var,unit=fit16)"},
    {"tq-2c", "k=lloyd(levels=4,center=1);v=lloyd(levels=4);sinks=4;recent=32"},
    {"tq-3c", "k=lloyd(levels=8,center=1);v=lloyd(levels=8);sinks=4;recent=32"},
};

}  // namespace

const char *preset_name(uint32_t index) { return index < std::size(kPresets) ? kPresets[index].name : nullptr; }

const char *preset_text(std::string_view name) {
  for (const Preset &preset : kPresets)
    if (name == preset.name) return preset.text;
  return nullptr;
}

}  // namespace kvq
