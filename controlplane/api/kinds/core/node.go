package core

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	helpers "k8s.io/component-helpers/scheduling/corev1"
	netutils "k8s.io/utils/net"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	nodeRolePrefix = "node-role.kubernetes.io/"
	nodeRoleLabel  = "kubernetes.io/role"
)

// NodeKind returns the definition of the kind Node.
func NodeKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Node", Plural: "nodes", Singular: "node", Short: []string{"no"},
		ClusterScoped: true,
	}, func(l *corev1.NodeList) *[]corev1.Node { return &l.Items })
	k.Writes.Default = builder.Default(func(n *corev1.Node) {
		if n.Status.Allocatable == nil && n.Status.Capacity != nil {
			n.Status.Allocatable = n.Status.Capacity.DeepCopy()
		}
		if n.Spec.PodCIDR == "" && len(n.Spec.PodCIDRs) > 0 {
			n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
		}
		if n.Spec.PodCIDR != "" && (len(n.Spec.PodCIDRs) == 0 || n.Spec.PodCIDRs[0] != n.Spec.PodCIDR) {
			n.Spec.PodCIDRs = []string{n.Spec.PodCIDR}
		}
	})
	builder.SeparateStatus(k, func(o *corev1.Node) *corev1.NodeStatus { return &o.Status },
		builder.Accessors[*corev1.Node]{
			Spec:     func(n *corev1.Node) any { return n.Spec },
			CopySpec: func(obj, old *corev1.Node) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *corev1.Node) {
				// A node registers itself with its status, so creation keeps it.
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.PrepareCreate(k, func(n *corev1.Node) { n.Generation, n.Spec.ConfigSource, n.Status.Config = 0, nil, nil })
	builder.PrepareUpdate(k, func(obj, old *corev1.Node) {
		if old.Spec.ConfigSource == nil {
			obj.Spec.ConfigSource = nil
		}
	})
	builder.AddValidation(k, validateNode)
	builder.AddUpdateValidation(k, validateNodeUpdate)
	status := k.Subresources["status"]
	validateMeta := status.ValidateUpdate
	status.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		n := obj.(*corev1.Node)
		errs := append(validateMeta(obj, old), validateNodeAnnotations(n.Annotations,
			field.NewPath("metadata", "annotations"))...)
		return append(append(errs, validateNodeStatus(n)...), validateNodeAddresses(n)...)
	}
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Status"), builder.StringColumn("Roles"),
		builder.AgeColumn, builder.StringColumn("Version"),
		builder.WideColumn("Internal-IP"), builder.WideColumn("External-IP"), builder.WideColumn("OS-Image"),
		builder.WideColumn("Kernel-Version"), builder.WideColumn("Container-Runtime"))
	k.Lists.Row = builder.Row(nodeRow)
	k.Lists.Fields = builder.Fields(func(n *corev1.Node) fields.Set {
		return fields.Set{"spec.unschedulable": strconv.FormatBool(n.Spec.Unschedulable)}
	})
	builder.AddSubresource(k, "proxy", &api.Subresource{GVK: corev1.SchemeGroupVersion.WithKind("NodeProxyOptions"),
		Verbs: builder.ProxyVerbs})
	return k
}

func validateNode(n *corev1.Node) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateNodeAnnotations(n.Annotations, field.NewPath("metadata", "annotations"))
	// In Kubernetes' errors, the paths of taints and swap of a node are below metadata.
	errs = append(errs, validateTaints(n.Spec.Taints, field.NewPath("metadata", "taints"))...)
	if swap := n.Status.NodeInfo.Swap; swap != nil && swap.Capacity != nil && *swap.Capacity <= 0 {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "nodeSwapStatus", "capacity"), *swap.Capacity,
			"must be greater than zero"))
	}
	for i, cidr := range n.Spec.PodCIDRs {
		errs = append(errs, validation.IsValidCIDR(spec.Child("podCIDRs").Index(i), cidr)...)
	}
	if len(n.Spec.PodCIDRs) > 1 {
		dual, err := netutils.IsDualStackCIDRStrings(n.Spec.PodCIDRs)
		if err != nil {
			errs = append(errs, field.InternalError(spec.Child("podCIDRs"),
				fmt.Errorf("invalid PodCIDRs. failed to check with dual stack with error:%w", err)))
		}
		if !dual || len(n.Spec.PodCIDRs) > 2 {
			errs = append(errs, field.Invalid(spec.Child("podCIDRs"), n.Spec.PodCIDRs,
				"may specify no more than one CIDR for each IP family"))
		}
	}
	return append(errs, validateNodeStatus(n)...)
}

// taintsAnnotation contained the taints of a node before the API had a field for them.
const taintsAnnotation = "scheduler.alpha.kubernetes.io/taints"

// validateNodeAnnotations validates the annotations that fields of the Node have since replaced.
// The paths and messages of the errors are those of Kubernetes.
func validateNodeAnnotations(annotations map[string]string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if text := annotations[taintsAnnotation]; text != "" {
		var taints []corev1.Taint
		if err := json.Unmarshal([]byte(text), &taints); err != nil {
			errs = append(errs, field.Invalid(fldPath, taintsAnnotation, err.Error()))
		} else {
			errs = append(errs, validateTaints(taints, fldPath.Child(taintsAnnotation))...)
		}
	}
	avoid, err := helpers.GetAvoidPodsFromNodeAnnotations(annotations)
	if err != nil {
		return append(errs, field.Invalid(fldPath.Child("AvoidPods"), corev1.PreferAvoidPodsAnnotationKey, err.Error()))
	}
	for i, entry := range avoid.PreferAvoidPods {
		here := fldPath.Child(corev1.PreferAvoidPodsAnnotationKey).Index(i).Child("PodSignature")
		switch owner := entry.PodSignature.PodController; {
		case owner == nil:
			errs = append(errs, field.Required(here, ""))
		case !ptr.Deref(owner.Controller, false):
			errs = append(errs, field.Invalid(here.Child("PodController", "Controller"), false,
				"must point to a controller"))
		}
	}
	return errs
}

func validateNodeStatus(n *corev1.Node) field.ErrorList {
	status := field.NewPath("status")
	errs := podspec.ValidateQuantities(n.Status.Capacity, status.Child("capacity"))
	errs = append(errs, podspec.ValidateQuantities(n.Status.Allocatable, status.Child("allocatable"))...)
	return append(errs, validateDeclaredFeatures(n.Status.DeclaredFeatures, status.Child("declaredFeatures"))...)
}

// validateNodeAddresses returns errors for duplicate addresses of a node. Kubernetes checks this
// only in updates, and its errors contain the value as its internal type.
func validateNodeAddresses(node *corev1.Node) field.ErrorList {
	type address struct {
		Type    corev1.NodeAddressType
		Address string
	}
	var errs field.ErrorList
	seen := map[corev1.NodeAddress]bool{}
	for i, a := range node.Status.Addresses {
		if seen[a] {
			errs = append(errs, field.Duplicate(field.NewPath("status", "addresses").Index(i), address(a)))
		}
		seen[a] = true
	}
	return errs
}

var declaredFeature = regexp.MustCompile(`^[A-Z][A-Za-z0-9]*(/[A-Za-z][A-Za-z0-9]*)*$`)

// validateDeclaredFeatures validates the names of the features that a node declares. They must be
// sorted.
func validateDeclaredFeatures(features []string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, f := range features {
		switch {
		case len(f) > validation.DNS1123SubdomainMaxLength:
			errs = append(errs, field.Invalid(fldPath.Index(i), f,
				fmt.Sprintf("invalid feature name %q: must be no more than %d characters", f,
					validation.DNS1123SubdomainMaxLength)))
		case !declaredFeature.MatchString(f):
			errs = append(errs, field.Invalid(fldPath.Index(i), f,
				fmt.Sprintf("invalid feature name %q: must start with an UpperCamelCase segment, "+
					"with subsequent segments separated by '/' (e.g., MyFeature or "+
					"MyFeature/mySubFeature), and contain "+
					"only alphanumeric "+
					"characters and slashes", f)))
		}
		if i+1 == len(features) {
			break
		}
		switch next := features[i+1]; {
		case f == next:
			errs = append(errs, field.Duplicate(fldPath.Index(i+1), next))
		case f > next:
			errs = append(errs, field.Invalid(fldPath.Index(i+1), next, "list must be sorted alphabetically"))
		}
	}
	return errs
}

func validateNodeUpdate(obj, old *corev1.Node) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateNodeAddresses(obj)
	if len(old.Spec.PodCIDRs) > 0 && !slices.Equal(obj.Spec.PodCIDRs, old.Spec.PodCIDRs) &&
		!addsFamily(obj.Spec.PodCIDRs, old.Spec.PodCIDRs) {
		errs = append(errs, field.Forbidden(spec.Child("podCIDRs"),
			"node updates may not change podCIDR except from \"\" to valid"))
	}
	if old.Spec.ProviderID != "" && obj.Spec.ProviderID != old.Spec.ProviderID {
		change := "modified"
		if obj.Spec.ProviderID == "" {
			change = "cleared"
		}
		errs = append(errs, field.Invalid(spec.Child("providerID"), nil, "field cannot be "+change+" once set"))
	}
	if obj.Spec.DoNotUseExternalID != old.Spec.DoNotUseExternalID {
		errs = append(errs, field.Forbidden(spec.Child("externalID"), "may not be updated"))
	}
	return errs
}

// addsFamily reports whether a node with podCIDRs of one IP family gets a podCIDR of the other
// family. Kubernetes rejects this change. In Keelson, a cluster may get its second family later.
func addsFamily(cidrs, old []string) bool {
	return len(old) == 1 && len(cidrs) == 2 && cidrs[0] == old[0] &&
		strings.Contains(cidrs[0], ":") != strings.Contains(cidrs[1], ":")
}

func validateTaints(taints []corev1.Taint, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	type identity struct {
		key    string
		effect corev1.TaintEffect
	}
	seen := map[identity]bool{}
	for i, t := range taints {
		p := fldPath.Index(i)
		errs = append(errs, fieldrules.InvalidErrors(p.Child("key"), t.Key, validation.IsQualifiedName(t.Key))...)
		errs = append(errs, fieldrules.InvalidErrors(p.Child("value"), t.Value,
			validation.IsValidLabelValue(t.Value))...)
		if t.Effect == "" {
			errs = append(errs, field.Required(p.Child("effect"), ""))
		} else {
			errs = append(errs, fieldrules.ValidateSupported(t.Effect, p.Child("effect"),
				corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)...)
		}
		id := identity{t.Key, t.Effect}
		if seen[id] {
			d := field.Duplicate(p, t)
			d.Detail = "taints must be unique by key and effect pair"
			errs = append(errs, d)
		}
		seen[id] = true
	}
	return errs
}

func nodeRow(n *corev1.Node, now time.Time) []any {
	runtime := n.Status.NodeInfo.ContainerRuntimeVersion
	return []any{
		n.Name, nodeState(n), builder.ValueOrNone(strings.Join(nodeRoles(n), ",")), builder.Age(n,
			now), n.Status.NodeInfo.KubeletVersion,
		builder.ValueOrNone(nodeAddress(n, corev1.NodeInternalIP)),
		builder.ValueOrNone(nodeAddress(n, corev1.NodeExternalIP)),
		valueOrUnknown(n.Status.NodeInfo.OSImage), valueOrUnknown(n.Status.NodeInfo.KernelVersion),
		valueOrUnknown(runtime),
	}
}

func nodeState(n *corev1.Node) string {
	state := "NotReady"
	switch ready := api.NodeCondition(n, corev1.NodeReady); {
	case ready == nil:
		state = "Unknown"
	case ready.Status == corev1.ConditionTrue:
		state = "Ready"
	}
	if n.Spec.Unschedulable {
		state += ",SchedulingDisabled"
	}
	return state
}

func nodeRoles(n *corev1.Node) []string {
	var roles []string
	for key, value := range n.Labels {
		if role, ok := strings.CutPrefix(key, nodeRolePrefix); ok && role != "" {
			roles = append(roles, role)
		} else if key == nodeRoleLabel && value != "" {
			roles = append(roles, value)
		}
	}
	slices.Sort(roles)
	return slices.Compact(roles)
}

func nodeAddress(n *corev1.Node, t corev1.NodeAddressType) string {
	for _, a := range n.Status.Addresses {
		if a.Type == t {
			return a.Address
		}
	}
	return ""
}

func valueOrUnknown(s string) string {
	if s == "" {
		return builder.Unknown
	}
	return s
}
