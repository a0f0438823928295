package plugins

import (
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	file "k8s.io/kube-scheduler/config/v1"

	"keelson.dev/keelson/controlplane/scheduler/config"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins/balancedallocation"
	"keelson.dev/keelson/controlplane/scheduler/plugins/defaultpreemption"
	"keelson.dev/keelson/controlplane/scheduler/plugins/dynamicresources"
	"keelson.dev/keelson/controlplane/scheduler/plugins/interpodaffinity"
	"keelson.dev/keelson/controlplane/scheduler/plugins/nodeaffinity"
	"keelson.dev/keelson/controlplane/scheduler/plugins/noderesourcesfit"
	"keelson.dev/keelson/controlplane/scheduler/plugins/podtopologyspread"
	"keelson.dev/keelson/controlplane/scheduler/plugins/volumebinding"
)

// SharedState is the plugin state that all profiles of one scheduler share: the volumes and devices
// that are reserved for pods that are not bound yet.
type SharedState struct {
	Promises *volumebinding.Promises
	Ledger   *dynamicresources.Ledger
}

// NewShared returns a SharedState in which no volumes and devices are reserved.
func NewShared() *SharedState {
	return &SharedState{Promises: volumebinding.NewPromises(), Ledger: dynamicresources.NewLedger()}
}

// Build returns the plugins of the profile p by extension point: the default plugins with the
// changes in the profile. s is the state that the plugins of all profiles share. The error contains
// the path of the invalid field.
func Build(h *framework.Handle, s *SharedState, p config.Profile) (framework.Layout, error) {
	defaults := Default(h)
	b := builder{known: make(map[string]framework.WeightedPlugin)}
	for _, w := range defaults {
		w.Plugin = withArgs(w.Plugin, h, s, p.Args)
		b.known[w.Plugin.Name()] = w
		b.multi = append(b.multi, w)
	}
	field := p.Field + ".plugins."
	for name, set := range map[string]file.PluginSet{"placementGenerate": p.Plugins.PlacementGenerate,
		"placementScore": p.Plugins.PlacementScore, "podGroupPostFilter": p.Plugins.PodGroupPostFilter} {
		if len(set.Enabled)+len(set.Disabled) > 0 {
			return nil, fmt.Errorf("%s%s: plugins for the placement of pod groups are not supported: leave it out",
				field, name)
		}
	}
	var err error
	if b.multi, err = b.mergeMultiPoint(field+"multiPoint", p.Plugins.MultiPoint); err != nil {
		return nil, err
	}
	out := make(framework.Layout)
	sets := bySet(&p.Plugins)
	for _, at := range framework.Points() {
		if out[at], err = b.pluginsAt(field+string(at), at, sets[at]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func bySet(p *file.Plugins) map[framework.Point]file.PluginSet {
	return map[framework.Point]file.PluginSet{
		framework.AtPreEnqueue: p.PreEnqueue, framework.AtQueueSort: p.QueueSort, framework.AtPreFilter: p.PreFilter,
		framework.AtFilter: p.Filter, framework.AtPostFilter: p.PostFilter, framework.AtPreScore: p.PreScore,
		framework.AtScore:   p.Score,
		framework.AtReserve: p.Reserve, framework.AtPermit: p.Permit, framework.AtPreBind: p.PreBind,
		framework.AtBind:     p.Bind,
		framework.AtPostBind: p.PostBind,
	}
}

type builder struct {
	known map[string]framework.WeightedPlugin
	multi []framework.WeightedPlugin // plugins that run at every extension point that they implement
}

// mergeMultiPoint returns the default plugins with the changes in the profile's multiPoint set. A
// disabled plugin is removed. An enabled default plugin keeps its position, unless it is also
// disabled, and gets the given weight. Other enabled plugins are appended.
func (b *builder) mergeMultiPoint(field string, set file.PluginSet) ([]framework.WeightedPlugin, error) {
	off, err := b.disabledNames(field, set.Disabled)
	if err != nil {
		return nil, err
	}
	on, err := b.lookUpEnabled(field, "", set.Enabled)
	if err != nil {
		return nil, err
	}
	var out []framework.WeightedPlugin
	for _, w := range b.multi {
		i := slices.IndexFunc(on, func(x framework.WeightedPlugin) bool { return x.Plugin.Name() == w.Plugin.Name() })
		switch {
		case off["*"] || off[w.Plugin.Name()]:
		case i >= 0:
			out = append(out, on[i])
			on = slices.Delete(on, i, i+1)
		default:
			out = append(out, w)
		}
	}
	return append(out, on...), nil
}

// pluginsAt returns the plugins of one extension point in the order in which they run. First come
// the multiPoint plugins that the profile also lists for this extension point, in the order of that
// list. Then come the other multiPoint plugins, and then the other plugins of the list.
func (b *builder) pluginsAt(
	field string, point framework.Point, set file.PluginSet,
) ([]framework.WeightedPlugin, error) {
	off, err := b.disabledNames(field, set.Disabled)
	if err != nil {
		return nil, err
	}
	on, err := b.lookUpEnabled(field, point, set.Enabled)
	if err != nil || off["*"] {
		return on, err
	}
	named := make(map[string]bool)
	for _, w := range on {
		named[w.Plugin.Name()] = true
	}
	override, multi := make(map[string]bool), []framework.WeightedPlugin(nil)
	for _, w := range b.multi {
		name := w.Plugin.Name()
		switch {
		case !point.Has(w.Plugin) || off[name]:
		case named[name]:
			override[name] = true
		default:
			multi = append(multi, w)
		}
	}
	var first, last []framework.WeightedPlugin
	for _, w := range on {
		if override[w.Plugin.Name()] {
			first = append(first, w)
		} else {
			last = append(last, w)
		}
	}
	return slices.Concat(first, multi, last), nil
}

func (b *builder) disabledNames(field string, list []file.Plugin) (map[string]bool, error) {
	out := make(map[string]bool)
	for i, x := range list {
		if _, ok := b.known[x.Name]; !ok && x.Name != "*" {
			return nil, fmt.Errorf("%s.disabled[%d].name: plugin %q does not exist: want * or some of %s", field, i,
				x.Name, b.pluginNames())
		}
		out[x.Name] = true
	}
	return out, nil
}

// lookUpEnabled returns the plugins that a list of enabled plugins names, with their weights. It
// returns an error for a plugin that is unknown or does not implement the given extension point; an
// empty point means multiPoint.
func (b *builder) lookUpEnabled(
	field string, point framework.Point, list []file.Plugin,
) ([]framework.WeightedPlugin, error) {
	var out []framework.WeightedPlugin
	for i, x := range list {
		field := fmt.Sprintf("%s.enabled[%d]", field, i)
		w, ok := b.known[x.Name]
		switch {
		case !ok:
			return nil, fmt.Errorf("%s.name: plugin %q does not exist: want some of %s", field, x.Name, b.pluginNames())
		case point != "" && !point.Has(w.Plugin):
			return nil, fmt.Errorf("%s.name: %s does not implement %s: remove it", field, x.Name, point)
		case slices.ContainsFunc(out, func(o framework.WeightedPlugin) bool { return o.Plugin.Name() == x.Name }):
			return nil, fmt.Errorf("%s.name: %s is listed twice", field, x.Name)
		}
		w.Weight = 1
		if x.Weight != nil && *x.Weight != 0 {
			if *x.Weight < 0 {
				return nil, fmt.Errorf("%s.weight: %d: want 1 or more", field, *x.Weight)
			}
			if !framework.AtScore.Has(w.Plugin) || point != "" && point != framework.AtScore {
				return nil, fmt.Errorf("%s.weight: %s does not score there: remove it", field, x.Name)
			}
			w.Weight = int64(*x.Weight)
		}
		out = append(out, w)
	}
	return out, nil
}

func (b *builder) pluginNames() string {
	var out []string
	for name := range b.known {
		out = append(out, name)
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

// withArgs returns a plugin like p that uses the arguments in a. VolumeBinding and DynamicResources
// also get the state s that all profiles share. Any other plugin without arguments in a is returned
// unchanged.
func withArgs(p framework.Plugin, h *framework.Handle, s *SharedState, a config.Args) framework.Plugin {
	switch p.Name() {
	case noderesourcesfit.Name:
		if a.Fit != nil {
			return noderesourcesfit.Plugin{Ignored: a.Fit.IgnoredResources, IgnoredGroups: a.Fit.IgnoredResourceGroups,
				Strategy: scoringStrategy(a.Fit.ScoringStrategy)}
		}
	case balancedallocation.Name:
		if a.Balanced != nil {
			x := balancedallocation.Plugin{}
			for _, r := range a.Balanced.Resources {
				x.Resources = append(x.Resources, v1.ResourceName(r.Name))
			}
			return x
		}
	case podtopologyspread.Name:
		if a.Spread != nil {
			return podtopologyspread.Plugin{Listed: a.Spread.DefaultingType == file.ListDefaulting,
				Defaults: a.Spread.DefaultConstraints}
		}
	case interpodaffinity.Name:
		if a.Affinity != nil {
			return interpodaffinity.Plugin{HardWeight: a.Affinity.HardPodAffinityWeight,
				OwnOnly: a.Affinity.IgnorePreferredTermsOfExistingPods}
		}
	case nodeaffinity.Name:
		if a.Nodes != nil {
			return nodeaffinity.Plugin{Added: a.Nodes.AddedAffinity}
		}
	case defaultpreemption.Name:
		if a.Preemption != nil {
			return defaultpreemption.Plugin{H: h, Percent: a.Preemption.MinCandidateNodesPercentage,
				Least: a.Preemption.MinCandidateNodesAbsolute}
		}
	case volumebinding.Name:
		patience := volumebinding.DefaultPatience
		if a.Volumes != nil && a.Volumes.BindTimeoutSeconds != nil {
			patience = time.Duration(*a.Volumes.BindTimeoutSeconds) * time.Second
		}
		return volumebinding.New(h, s.Promises, patience)
	case dynamicresources.Name:
		search, patience := dynamicresources.DefaultSearch, dynamicresources.DefaultPatience
		if a.Devices != nil && a.Devices.FilterTimeout != nil {
			search = a.Devices.FilterTimeout.Duration
		}
		if a.Devices != nil && a.Devices.BindingTimeout != nil {
			patience = a.Devices.BindingTimeout.Duration
		}
		return dynamicresources.New(h, s.Ledger, search, patience)
	}
	return p
}

func scoringStrategy(s *file.ScoringStrategy) *noderesourcesfit.Strategy {
	if s == nil {
		return nil
	}
	out := &noderesourcesfit.Strategy{}
	for _, r := range s.Resources {
		out.Resources = append(out.Resources, noderesourcesfit.Resource{Name: v1.ResourceName(r.Name),
			Weight: r.Weight})
	}
	switch s.Type {
	case file.MostAllocated:
		out.Kind = noderesourcesfit.Most
	case file.RequestedToCapacityRatio:
		out.Kind = noderesourcesfit.Ratio
		for _, p := range s.RequestedToCapacityRatio.Shape {
			// In the configuration, scores of a shape are at most 10; in the plugin, at most
			// framework.MaxScore.
			out.Shape = append(out.Shape, noderesourcesfit.Step{Utilization: int64(p.Utilization),
				Score: int64(p.Score) * framework.MaxScore / 10})
		}
	}
	return out
}
