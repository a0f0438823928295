// Package scheduling describes the kinds of the API group scheduling.k8s.io.
package scheduling

import (
	"context"
	"fmt"
	"slices"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/operation"
	"k8s.io/apimachinery/pkg/api/validate"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// PodGroup (pods that are scheduled together) and Workload (from which controllers create
// PodGroups). Fields of the feature gates CompositePodGroup, TopologyAwareWorkloadScheduling,
// DRAWorkloadResourceClaims and PodGroupPreemptionPolicy are dropped by package fields, as in
// Kubernetes without these gates. So they are not validated here.

// PodGroupProtection is the finalizer that keeps a PodGroup until its pods have ended.
const PodGroupProtection = "scheduling.k8s.io/podgroup-protection"

// WorkloadKind returns the definition of the kind Workload.
func WorkloadKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: schedulingv1beta1.SchemeGroupVersion, Kind: "Workload", Plural: "workloads", Singular: "workload",
	}, func(l *schedulingv1beta1.WorkloadList) *[]schedulingv1beta1.Workload { return &l.Items })
	builder.AddValidation(k, func(w *schedulingv1beta1.Workload) field.ErrorList {
		at := field.NewPath("spec")
		errs := validateControllerRef(w.Spec.ControllerRef, at.Child("controllerRef"))
		return append(errs, validateGroupTemplates(w.Spec.PodGroupTemplates, at.Child("podGroupTemplates"))...)
	})
	builder.AddUpdateValidation(k, func(obj, old *schedulingv1beta1.Workload) field.ErrorList {
		at := field.NewPath("spec")
		errs := unchanged(obj.Spec.ControllerRef, old.Spec.ControllerRef, at.Child("controllerRef"))
		return append(errs, validateGroupTemplatesUpdate(obj.Spec.PodGroupTemplates, old.Spec.PodGroupTemplates,
			at.Child("podGroupTemplates"))...)
	})
	return k
}

// PodGroupKind returns the definition of the kind PodGroup.
func PodGroupKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: schedulingv1beta1.SchemeGroupVersion, Kind: "PodGroup", Plural: "podgroups", Singular: "podgroup",
	}, func(l *schedulingv1beta1.PodGroupList) *[]schedulingv1beta1.PodGroup { return &l.Items })
	k.Default = builder.Default(func(g *schedulingv1beta1.PodGroup) {
		if g.Spec.DisruptionMode == nil {
			g.Spec.DisruptionMode = &schedulingv1beta1.DisruptionMode{Single: &schedulingv1beta1.SingleDisruptionMode{}}
		}
	})
	builder.SeparateSpecAndStatus(k, func(g *schedulingv1beta1.PodGroup) *schedulingv1beta1.PodGroupSpec { return &g.Spec },
		func(g *schedulingv1beta1.PodGroup) *schedulingv1beta1.PodGroupStatus { return &g.Status })
	builder.OmitGeneration(k)
	builder.KeepMetadataOnStatus(k)
	builder.AddValidation(k, func(g *schedulingv1beta1.PodGroup) field.ErrorList {
		at := field.NewPath("spec")
		errs := validateWorkloadRef(g.Spec.WorkloadRef, at.Child("workloadRef"))
		return append(errs, validateGroupTerms(&schedulingv1beta1.PodGroupTemplate{
			SchedulingPolicy: g.Spec.SchedulingPolicy, DisruptionMode: g.Spec.DisruptionMode,
			PriorityClassName: g.Spec.PriorityClassName, Priority: g.Spec.Priority}, at)...)
	})
	builder.AddUpdateValidation(k, func(obj, old *schedulingv1beta1.PodGroup) field.ErrorList {
		at, now, was := field.NewPath("spec"), &obj.Spec, &old.Spec
		errs := unchanged(now.WorkloadRef, was.WorkloadRef, at.Child("workloadRef"))
		errs = append(errs, validatePolicyUpdate(&now.SchedulingPolicy, &was.SchedulingPolicy, at.Child("schedulingPolicy"))...)
		errs = append(errs, unchanged(now.DisruptionMode, was.DisruptionMode, at.Child("disruptionMode"))...)
		errs = append(errs, unchanged(now.PriorityClassName, was.PriorityClassName, at.Child("priorityClassName"))...)
		return append(errs, unchanged(now.Priority, was.Priority, at.Child("priority"))...)
	})
	status := k.Subresources["status"]
	keepSpec := status.PrepareUpdate
	status.PrepareUpdate = func(obj, old api.Object) {
		keepSpec(obj, old)
		// Kubernetes clears the field where groups may not claim devices.
		obj.(*schedulingv1beta1.PodGroup).Status.ResourceClaimStatuses = nil
	}
	builder.AddStatusValidation(k, func(obj, _ *schedulingv1beta1.PodGroup) field.ErrorList {
		return metavalidation.ValidateConditions(obj.Status.Conditions, field.NewPath("status", "conditions"))
	})
	return k
}

// unchanged returns an error if an immutable field has changed, with the text of Kubernetes'
// declarative validation.
func unchanged(obj, old any, at *field.Path) field.ErrorList {
	if fieldrules.SemanticEqual(obj, old) {
		return nil
	}
	return field.ErrorList{field.Invalid(at, nil, "field is immutable")}
}

// format is the format of a name. An empty name is Required.
type format func(context.Context, operation.Operation, *field.Path, *string, *string) field.ErrorList

func required(v string, at *field.Path, rule format) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return wellFormed(v, at, rule)
}

func wellFormed(v string, at *field.Path, rule format) field.ErrorList {
	if v == "" {
		return nil
	}
	return rule(context.Background(), operation.Operation{}, at, &v, nil)
}

func validateControllerRef(ref *schedulingv1beta1.TypedLocalObjectReference, at *field.Path) field.ErrorList {
	if ref == nil {
		return nil
	}
	errs := wellFormed(ref.APIGroup, at.Child("apiGroup"), validate.LongName)
	errs = append(errs, required(ref.Kind, at.Child("kind"), validate.PathSegmentName)...)
	return append(errs, required(ref.Name, at.Child("name"), validate.PathSegmentName)...)
}

func validateWorkloadRef(ref *schedulingv1beta1.WorkloadReference, at *field.Path) field.ErrorList {
	if ref == nil {
		return nil
	}
	errs := required(ref.WorkloadName, at.Child("workloadName"), validate.LongName)
	return append(errs, required(ref.TemplateName, at.Child("templateName"), validate.ShortName)...)
}

func validateGroupTemplates(list []schedulingv1beta1.PodGroupTemplate, at *field.Path) field.ErrorList {
	switch {
	case len(list) == 0:
		return field.ErrorList{field.Invalid(at.Root(), "", "must specify one of: `podGroupTemplates`, `compositePodGroupTemplates`")}
	case len(list) > schedulingv1beta1.WorkloadMaxPodGroupTemplates:
		return field.ErrorList{field.TooMany(at, len(list), schedulingv1beta1.WorkloadMaxPodGroupTemplates)}
	}
	var errs field.ErrorList
	for i := range list {
		here := at.Index(i)
		if slices.ContainsFunc(list[:i], func(t schedulingv1beta1.PodGroupTemplate) bool { return t.Name == list[i].Name }) {
			errs = append(errs, field.Duplicate(here, list[i].Name))
		}
		errs = append(errs, required(list[i].Name, here.Child("name"), validate.ShortName)...)
		errs = append(errs, validateGroupTerms(&list[i], here)...)
	}
	return errs
}

// validateGroupTerms validates the common fields of a PodGroup and of a template of PodGroups.
func validateGroupTerms(t *schedulingv1beta1.PodGroupTemplate, at *field.Path) field.ErrorList {
	policy := at.Child("schedulingPolicy")
	errs := oneMember(policy, member{"basic", t.SchedulingPolicy.Basic != nil}, member{"gang", t.SchedulingPolicy.Gang != nil})
	if g, here := t.SchedulingPolicy.Gang, policy.Child("gang", "minCount"); g != nil && g.MinCount == 0 {
		errs = append(errs, field.Required(here, ""))
	} else if g != nil {
		errs = append(errs, validate.Minimum(context.Background(), operation.Operation{}, here, &g.MinCount, nil, 1)...)
	}
	if m := t.DisruptionMode; m != nil {
		errs = append(errs, oneMember(at.Child("disruptionMode"), member{"single", m.Single != nil}, member{"all", m.All != nil})...)
	}
	errs = append(errs, wellFormed(t.PriorityClassName, at.Child("priorityClassName"), validate.LongName)...)
	if t.Priority != nil {
		errs = append(errs, validate.Maximum(context.Background(), operation.Operation{}, at.Child("priority"), t.Priority, nil, MaxUserPriority)...)
	}
	return errs
}

// member is a member of a union, and whether it is set.
type member struct {
	name string
	set  bool
}

func oneMember(at *field.Path, members ...member) field.ErrorList {
	var all, set string
	n := 0
	for i, m := range members {
		if i > 0 {
			all += ", "
		}
		all += "`" + m.name + "`"
		if !m.set {
			continue
		}
		if n++; n > 1 {
			set += ", "
		}
		set += m.name
	}
	switch n {
	case 1:
		return nil
	case 0:
		return field.ErrorList{field.Invalid(at, "", "must specify one of: "+all)}
	}
	return field.ErrorList{field.Invalid(at, fmt.Sprintf("{%s}", set), "must specify exactly one of: "+all)}
}

// validateGroupTemplatesUpdate validates the mutable fields of templates, and returns errors for
// other changes. Templates may not be added or removed.
func validateGroupTemplatesUpdate(list, old []schedulingv1beta1.PodGroupTemplate, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	find := func(in []schedulingv1beta1.PodGroupTemplate, name string) *schedulingv1beta1.PodGroupTemplate {
		if i := slices.IndexFunc(in, func(t schedulingv1beta1.PodGroupTemplate) bool { return t.Name == name }); i >= 0 {
			return &in[i]
		}
		return nil
	}
	for i := range list {
		now, was, here := &list[i], find(old, list[i].Name), at.Index(i)
		if was == nil {
			errs = append(errs, field.Forbidden(here, "item may not be added"))
			continue
		}
		errs = append(errs, validatePolicyUpdate(&now.SchedulingPolicy, &was.SchedulingPolicy, here.Child("schedulingPolicy"))...)
		errs = append(errs, unchanged(now.DisruptionMode, was.DisruptionMode, here.Child("disruptionMode"))...)
		errs = append(errs, unchanged(now.PriorityClassName, was.PriorityClassName, here.Child("priorityClassName"))...)
		errs = append(errs, unchanged(now.Priority, was.Priority, here.Child("priority"))...)
	}
	for i := range old {
		if find(list, old[i].Name) == nil {
			errs = append(errs, field.Forbidden(at, "item may not be removed"))
		}
	}
	return errs
}

// validatePolicyUpdate returns an error if the policy's type has changed. The minCount of a gang
// may change.
func validatePolicyUpdate(now, was *schedulingv1beta1.PodGroupSchedulingPolicy, at *field.Path) field.ErrorList {
	errs := unchanged(now.Basic, was.Basic, at.Child("basic"))
	return append(errs, validate.UpdatePointer(context.Background(), operation.Operation{Type: operation.Update}, at.Child("gang"),
		now.Gang, was.Gang, validate.NoSet, validate.NoUnset)...)
}
