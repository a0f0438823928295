package config

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	file "k8s.io/kube-scheduler/config/v1"
	kjson "sigs.k8s.io/json"
)

// Args are the arguments of the plugins of one profile. A field is nil if the configuration file
// does not set the arguments of that plugin.
type Args struct {
	Fit        *file.NodeResourcesFitArgs
	Balanced   *file.NodeResourcesBalancedAllocationArgs
	Spread     *file.PodTopologySpreadArgs
	Affinity   *file.InterPodAffinityArgs
	Nodes      *file.NodeAffinityArgs
	Preemption *file.DefaultPreemptionArgs
	Volumes    *file.VolumeBindingArgs
	Devices    *file.DynamicResourcesArgs
}

// readArgs decodes and checks the plugin arguments of a profile (its pluginConfig). profile is the
// path of the profile in the configuration file, for error messages.
func readArgs(profile string, list []file.PluginConfig) (Args, error) {
	var a Args
	seen := map[string]bool{}
	for i, c := range list {
		field := fmt.Sprintf("%s.pluginConfig[%d]", profile, i)
		if seen[c.Name] {
			return a, fmt.Errorf("%s.name: %s has arguments already: combine them in one entry", field, c.Name)
		}
		seen[c.Name] = true
		if err := a.decodeArgs(field, c); err != nil {
			return a, err
		}
	}
	return a, nil
}

func (a *Args) decodeArgs(field string, c file.PluginConfig) error {
	at := field + ".args"
	switch c.Name {
	case "NodeResourcesFit":
		return decodePluginArgs(at, c, &a.Fit, checkFit)
	case "NodeResourcesBalancedAllocation":
		return decodePluginArgs(at, c, &a.Balanced, func(x *file.NodeResourcesBalancedAllocationArgs) error {
			return checkBalanced(x.Resources)
		})
	case "PodTopologySpread":
		return decodePluginArgs(at, c, &a.Spread, checkSpread)
	case "InterPodAffinity":
		return decodePluginArgs(at, c, &a.Affinity, func(x *file.InterPodAffinityArgs) error {
			return checkRange("hardPodAffinityWeight", x.HardPodAffinityWeight, 0, 100)
		})
	case "NodeAffinity":
		return decodePluginArgs(at, c, &a.Nodes, func(x *file.NodeAffinityArgs) error {
			return checkAdded(x.AddedAffinity)
		})
	case "DefaultPreemption":
		return decodePluginArgs(at, c, &a.Preemption, checkPreemption)
	case "VolumeBinding":
		return decodePluginArgs(at, c, &a.Volumes, checkVolumes)
	case "DynamicResources":
		return decodePluginArgs(at, c, &a.Devices, checkDevices)
	}
	return fmt.Errorf("%s.name: plugin %q takes no arguments here: remove it; plugins with arguments are "+
		"DefaultPreemption, DynamicResources, InterPodAffinity, "+
		"NodeAffinity, NodeResourcesBalancedAllocation, NodeResourcesFit, PodTopologySpread and VolumeBinding", field,
		c.Name)
}

// decodePluginArgs decodes the arguments of one plugin into a new T, stores the T in target, and
// calls check. The arguments may contain apiVersion and kind, which must then match the plugin.
func decodePluginArgs[T any](field string, c file.PluginConfig, target **T, check func(*T) error) error {
	*target = new(T)
	if len(c.Args.Raw) == 0 || string(c.Args.Raw) == "null" {
		return nil
	}
	if err := decodeStrict(c.Args.Raw, *target); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	var own metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(c.Args.Raw, &own); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	if kind := c.Name + "Args"; own.Kind != "" && own.Kind != kind ||
		own.APIVersion != "" && own.APIVersion != file.SchemeGroupVersion.String() {
		return fmt.Errorf("%s: apiVersion %q, kind %q: want %s, %s, or leave both out", field, own.APIVersion, own.Kind,
			file.SchemeGroupVersion, kind)
	}
	if err := check(*target); err != nil {
		return fmt.Errorf("%s.%w", field, err)
	}
	return nil
}

func checkRange(field string, n *int32, least, most int32) error {
	if n != nil && (*n < least || *n > most) {
		return fmt.Errorf("%s: %d: want %d to %d", field, *n, least, most)
	}
	return nil
}

func checkFit(a *file.NodeResourcesFitArgs) error {
	for i, r := range a.IgnoredResources {
		if !strings.Contains(r, "/") || strings.HasPrefix(r, v1.ResourceDefaultNamespacePrefix) ||
			len(validation.IsQualifiedName(r)) > 0 {
			return fmt.Errorf("ignoredResources[%d]: %q: want the name of an extended resource, such as "+
				"example.com/gpu", i, r)
		}
	}
	for i, g := range a.IgnoredResourceGroups {
		if strings.Contains(g, "/") || len(validation.IsDNS1123Subdomain(g)) > 0 {
			return fmt.Errorf("ignoredResourceGroups[%d]: %q: want the group before the / of extended resources, such "+
				"as example.com", i, g)
		}
	}
	s := a.ScoringStrategy
	if s == nil {
		return nil
	}
	s.Type = cmp.Or(s.Type, file.LeastAllocated)
	if err := checkResources("scoringStrategy.resources", s.Resources); err != nil {
		return err
	}
	switch s.Type {
	case file.LeastAllocated, file.MostAllocated:
		if s.RequestedToCapacityRatio != nil {
			return fmt.Errorf("scoringStrategy.requestedToCapacityRatio: type %s does not use it: leave it out", s.Type)
		}
	case file.RequestedToCapacityRatio:
		if s.RequestedToCapacityRatio == nil {
			return fmt.Errorf("scoringStrategy.requestedToCapacityRatio: type %s needs a shape", s.Type)
		}
		return checkShape("scoringStrategy.requestedToCapacityRatio.shape", s.RequestedToCapacityRatio.Shape)
	default:
		return fmt.Errorf("scoringStrategy.type: %q: want %s, %s or %s", s.Type, file.LeastAllocated,
			file.MostAllocated, file.RequestedToCapacityRatio)
	}
	return nil
}

// checkResources returns an error if a resource in the list has an invalid name or weight. It sets
// a weight that is missing to 1. field is the path of the list in the configuration file, for error
// messages.
func checkResources(field string, list []file.ResourceSpec) error {
	for i := range list {
		r := &list[i]
		r.Weight = cmp.Or(r.Weight, 1)
		switch {
		case len(validation.IsQualifiedName(r.Name)) > 0:
			return fmt.Errorf("%s[%d].name: %q: want a resource, such as cpu or example.com/gpu", field, i, r.Name)
		case r.Weight < 1 || r.Weight > 100:
			return fmt.Errorf("%s[%d].weight: %d: want 1 to 100", field, i, r.Weight)
		case slices.ContainsFunc(list[:i], func(o file.ResourceSpec) bool { return o.Name == r.Name }):
			return fmt.Errorf("%s[%d].name: %s is listed twice", field, i, r.Name)
		}
	}
	return nil
}

func checkBalanced(list []file.ResourceSpec) error {
	for i, r := range list {
		if r.Weight != 0 && r.Weight != 1 {
			return fmt.Errorf("resources[%d].weight: %d: all resources have the same weight for balance: want 1", i,
				r.Weight)
		}
	}
	return checkResources("resources", list)
}

func checkShape(field string, shape []file.UtilizationShapePoint) error {
	if len(shape) == 0 || len(shape) > 101 {
		return fmt.Errorf("%s: %d points: want 1 to 101", field, len(shape))
	}
	for i, p := range shape {
		switch {
		case p.Utilization < 0 || p.Utilization > 100:
			return fmt.Errorf("%s[%d].utilization: %d: want 0 to 100", field, i, p.Utilization)
		case i > 0 && p.Utilization <= shape[i-1].Utilization:
			return fmt.Errorf("%s[%d].utilization: %d: want points in increasing order of utilization", field,
				i, p.Utilization)
		case p.Score < 0 || p.Score > 10:
			return fmt.Errorf("%s[%d].score: %d: want 0 to 10", field, i, p.Score)
		}
	}
	return nil
}

func checkSpread(a *file.PodTopologySpreadArgs) error {
	a.DefaultingType = cmp.Or(a.DefaultingType, file.SystemDefaulting)
	switch {
	case a.DefaultingType != file.SystemDefaulting && a.DefaultingType != file.ListDefaulting:
		return fmt.Errorf("defaultingType: %q: want System or List", a.DefaultingType)
	case a.DefaultingType == file.SystemDefaulting && len(a.DefaultConstraints) > 0:
		return errors.New("defaultConstraints: they require defaultingType: List")
	}
	for i, c := range a.DefaultConstraints {
		field := fmt.Sprintf("defaultConstraints[%d]", i)
		switch {
		case c.MaxSkew < 1:
			return fmt.Errorf("%s.maxSkew: %d: want 1 or more", field, c.MaxSkew)
		case len(validation.IsQualifiedName(c.TopologyKey)) > 0:
			return fmt.Errorf("%s.topologyKey: %q: want the key of a node label", field, c.TopologyKey)
		case c.WhenUnsatisfiable != v1.DoNotSchedule && c.WhenUnsatisfiable != v1.ScheduleAnyway:
			return fmt.Errorf("%s.whenUnsatisfiable: %q: want DoNotSchedule or ScheduleAnyway", field,
				c.WhenUnsatisfiable)
		case c.LabelSelector != nil || len(c.MatchLabelKeys) > 0:
			return fmt.Errorf("%s.labelSelector: the pods are determined by the pod's owner: leave it and "+
				"matchLabelKeys out", field)
		case c.MinDomains != nil && (*c.MinDomains < 1 || c.WhenUnsatisfiable != v1.DoNotSchedule):
			return fmt.Errorf("%s.minDomains: %d: want 1 or more, with DoNotSchedule", field, *c.MinDomains)
		case slices.ContainsFunc(a.DefaultConstraints[:i], func(o v1.TopologySpreadConstraint) bool {
			return o.TopologyKey == c.TopologyKey && o.WhenUnsatisfiable == c.WhenUnsatisfiable
		}):
			return fmt.Errorf("%s: %s is listed twice with %s", field, c.TopologyKey, c.WhenUnsatisfiable)
		}
		for name, p := range map[string]*v1.NodeInclusionPolicy{"nodeAffinityPolicy": c.NodeAffinityPolicy,
			"nodeTaintsPolicy": c.NodeTaintsPolicy} {
			if p != nil && *p != v1.NodeInclusionPolicyHonor && *p != v1.NodeInclusionPolicyIgnore {
				return fmt.Errorf("%s.%s: %q: want Honor or Ignore", field, name, *p)
			}
		}
	}
	return nil
}

func checkAdded(a *v1.NodeAffinity) error {
	if a == nil {
		return nil
	}
	if r := a.RequiredDuringSchedulingIgnoredDuringExecution; r != nil {
		if _, err := nodeaffinity.NewNodeSelector(r); err != nil {
			return fmt.Errorf("addedAffinity.requiredDuringSchedulingIgnoredDuringExecution: %w", err)
		}
		if len(r.NodeSelectorTerms) == 0 {
			return errors.New("addedAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms: want " +
				"at least one: an empty list matches no node")
		}
	}
	const preferred = "addedAffinity.preferredDuringSchedulingIgnoredDuringExecution"
	for i, t := range a.PreferredDuringSchedulingIgnoredDuringExecution {
		if t.Weight < 1 || t.Weight > 100 {
			return fmt.Errorf("%s[%d].weight: %d: want 1 to 100", preferred, i, t.Weight)
		}
	}
	if _, err := nodeaffinity.NewPreferredSchedulingTerms(a.PreferredDuringSchedulingIgnoredDuringExecution); err !=
		nil {
		return fmt.Errorf("%s: %w", preferred, err)
	}
	return nil
}

func checkPreemption(a *file.DefaultPreemptionArgs) error {
	if err := checkRange("minCandidateNodesPercentage", a.MinCandidateNodesPercentage, 0, 100); err != nil {
		return err
	}
	if n := a.MinCandidateNodesAbsolute; n != nil && *n < 0 {
		return fmt.Errorf("minCandidateNodesAbsolute: %d: want 0 or more", *n)
	}
	if p, n := a.MinCandidateNodesPercentage, a.MinCandidateNodesAbsolute; p != nil && n != nil && *p == 0 && *n == 0 {
		return errors.New("minCandidateNodesAbsolute: 0, and minCandidateNodesPercentage too: want one of them above 0")
	}
	return nil
}

func checkVolumes(a *file.VolumeBindingArgs) error {
	if n := a.BindTimeoutSeconds; n != nil && (*n < 0 || *n > 24*3600) {
		return fmt.Errorf("bindTimeoutSeconds: %d: want 0 to 86400", *n)
	}
	if len(a.Shape) > 0 {
		return errors.New("shape: scoring by volume size is not supported: leave it out")
	}
	return nil
}

// maxSearch is the largest permitted filterTimeout, an argument of the plugin DynamicResources.
// That timeout bounds the search for devices in one attempt, during which no other pod is
// scheduled.
const maxSearch = 10 * time.Second

func checkDevices(a *file.DynamicResourcesArgs) error {
	if d := a.FilterTimeout; d != nil && (d.Duration <= 0 || d.Duration > maxSearch) {
		return fmt.Errorf("filterTimeout: %v: want more than 0s and at most %v, because other pods wait meanwhile",
			d.Duration, maxSearch)
	}
	if d := a.BindingTimeout; d != nil && (d.Duration < time.Second || d.Duration > 24*time.Hour) {
		return fmt.Errorf("bindingTimeout: %v: want 1s to 24h", d.Duration)
	}
	return nil
}
