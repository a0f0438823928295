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

// A PodGroup is a group of pods that are scheduled together. Controllers create PodGroups from a
// Workload. Package fields drops the fields of the feature gates CompositePodGroup,
// TopologyAwareWorkloadScheduling, DRAWorkloadResourceClaims and PodGroupPreemptionPolicy, as in
// Kubernetes without these gates. So they are not validated here.

// PodGroupProtection is the finalizer that keeps a PodGroup until its pods have terminated.
const PodGroupProtection = "scheduling.k8s.io/podgroup-protection"

// WorkloadKind returns the definition of the kind Workload.
func WorkloadKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: schedulingv1beta1.SchemeGroupVersion, Kind: "Workload", Plural: "workloads", Singular: "workload",
	}, func(l *schedulingv1beta1.WorkloadList) *[]schedulingv1beta1.Workload { return &l.Items })
	builder.AddValidation(k, func(w *schedulingv1beta1.Workload) field.ErrorList {
		fldPath := field.NewPath("spec")
		errs := validateControllerRef(w.Spec.ControllerRef, fldPath.Child("controllerRef"))
		return append(errs, validateGroupTemplates(w.Spec.PodGroupTemplates, fldPath.Child("podGroupTemplates"))...)
	})
	builder.AddUpdateValidation(k, func(obj, old *schedulingv1beta1.Workload) field.ErrorList {
		fldPath := field.NewPath("spec")
		errs := validateUnchanged(obj.Spec.ControllerRef, old.Spec.ControllerRef, fldPath.Child("controllerRef"))
		return append(errs, validateGroupTemplatesUpdate(obj.Spec.PodGroupTemplates, old.Spec.PodGroupTemplates,
			fldPath.Child("podGroupTemplates"))...)
	})
	return k
}

// PodGroupKind returns the definition of the kind PodGroup.
func PodGroupKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: schedulingv1beta1.SchemeGroupVersion, Kind: "PodGroup", Plural: "podgroups", Singular: "podgroup",
	}, func(l *schedulingv1beta1.PodGroupList) *[]schedulingv1beta1.PodGroup { return &l.Items })
	k.Writes.Default = builder.Default(func(g *schedulingv1beta1.PodGroup) {
		if g.Spec.DisruptionMode == nil {
			g.Spec.DisruptionMode = &schedulingv1beta1.DisruptionMode{Single: &schedulingv1beta1.SingleDisruptionMode{}}
		}
	})
	builder.SeparateSpecAndStatus(k, func(g *schedulingv1beta1.PodGroup) *schedulingv1beta1.PodGroupSpec {
		return &g.Spec
	},
		func(g *schedulingv1beta1.PodGroup) *schedulingv1beta1.PodGroupStatus { return &g.Status })
	builder.OmitGeneration(k)
	builder.KeepMetadataOnStatus(k)
	builder.AddValidation(k, func(g *schedulingv1beta1.PodGroup) field.ErrorList {
		fldPath := field.NewPath("spec")
		errs := validateWorkloadRef(g.Spec.WorkloadRef, fldPath.Child("workloadRef"))
		return append(errs, validateGroupTerms(&schedulingv1beta1.PodGroupTemplate{
			SchedulingPolicy: g.Spec.SchedulingPolicy, DisruptionMode: g.Spec.DisruptionMode,
			PriorityClassName: g.Spec.PriorityClassName, Priority: g.Spec.Priority}, fldPath)...)
	})
	builder.AddUpdateValidation(k, func(obj, old *schedulingv1beta1.PodGroup) field.ErrorList {
		fldPath, updated, previous := field.NewPath("spec"), &obj.Spec, &old.Spec
		errs := validateUnchanged(updated.WorkloadRef, previous.WorkloadRef, fldPath.Child("workloadRef"))
		errs = append(errs, validatePolicyUpdate(&updated.SchedulingPolicy, &previous.SchedulingPolicy,
			fldPath.Child("schedulingPolicy"))...)
		errs = append(errs, validateUnchanged(updated.DisruptionMode, previous.DisruptionMode,
			fldPath.Child("disruptionMode"))...)
		errs = append(errs, validateUnchanged(updated.PriorityClassName, previous.PriorityClassName,
			fldPath.Child("priorityClassName"))...)
		return append(errs, validateUnchanged(updated.Priority, previous.Priority, fldPath.Child("priority"))...)
	})
	status := k.Subresources["status"]
	keepSpec := status.PrepareUpdate
	status.PrepareUpdate = func(obj, old api.Object) {
		keepSpec(obj, old)
		// Kubernetes clears the field while its feature gate is off, so that groups cannot claim
		// devices.
		obj.(*schedulingv1beta1.PodGroup).Status.ResourceClaimStatuses = nil
	}
	builder.AddStatusValidation(k, func(obj, _ *schedulingv1beta1.PodGroup) field.ErrorList {
		return metavalidation.ValidateConditions(obj.Status.Conditions, field.NewPath("status", "conditions"))
	})
	return k
}

// validateUnchanged returns an error if an immutable field has changed, with the message of
// Kubernetes' declarative validation.
func validateUnchanged(obj, old any, fldPath *field.Path) field.ErrorList {
	if fieldrules.SemanticEqual(obj, old) {
		return nil
	}
	return field.ErrorList{field.Invalid(fldPath, nil, "field is immutable")}
}

// format is a function of Kubernetes' declarative validation that validates the format of a name.
type format func(context.Context, operation.Operation, *field.Path, *string, *string) field.ErrorList

func validateRequired(v string, fldPath *field.Path, rule format) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	return validateFormat(v, fldPath, rule)
}

func validateFormat(v string, fldPath *field.Path, rule format) field.ErrorList {
	if v == "" {
		return nil
	}
	return rule(context.Background(), operation.Operation{}, fldPath, &v, nil)
}

func validateControllerRef(ref *schedulingv1beta1.TypedLocalObjectReference, fldPath *field.Path) field.ErrorList {
	if ref == nil {
		return nil
	}
	errs := validateFormat(ref.APIGroup, fldPath.Child("apiGroup"), validate.LongName)
	errs = append(errs, validateRequired(ref.Kind, fldPath.Child("kind"), validate.PathSegmentName)...)
	return append(errs, validateRequired(ref.Name, fldPath.Child("name"), validate.PathSegmentName)...)
}

func validateWorkloadRef(ref *schedulingv1beta1.WorkloadReference, fldPath *field.Path) field.ErrorList {
	if ref == nil {
		return nil
	}
	errs := validateRequired(ref.WorkloadName, fldPath.Child("workloadName"), validate.LongName)
	return append(errs, validateRequired(ref.TemplateName, fldPath.Child("templateName"), validate.ShortName)...)
}

func validateGroupTemplates(list []schedulingv1beta1.PodGroupTemplate, fldPath *field.Path) field.ErrorList {
	switch {
	case len(list) == 0:
		return field.ErrorList{field.Invalid(fldPath.Root(), "",
			"must specify one of: `podGroupTemplates`, `compositePodGroupTemplates`")}
	case len(list) > schedulingv1beta1.WorkloadMaxPodGroupTemplates:
		return field.ErrorList{field.TooMany(fldPath, len(list), schedulingv1beta1.WorkloadMaxPodGroupTemplates)}
	}
	var errs field.ErrorList
	for i := range list {
		here := fldPath.Index(i)
		if slices.ContainsFunc(list[:i], func(t schedulingv1beta1.PodGroupTemplate) bool {
			return t.Name == list[i].Name
		}) {
			errs = append(errs, field.Duplicate(here, list[i].Name))
		}
		errs = append(errs, validateRequired(list[i].Name, here.Child("name"), validate.ShortName)...)
		errs = append(errs, validateGroupTerms(&list[i], here)...)
	}
	return errs
}

// validateGroupTerms validates the fields that PodGroups and PodGroup templates have in common.
func validateGroupTerms(t *schedulingv1beta1.PodGroupTemplate, fldPath *field.Path) field.ErrorList {
	policy := fldPath.Child("schedulingPolicy")
	errs := validateOneMember(policy, member{"basic", t.SchedulingPolicy.Basic != nil},
		member{"gang", t.SchedulingPolicy.Gang != nil})
	if g, here := t.SchedulingPolicy.Gang, policy.Child("gang", "minCount"); g != nil && g.MinCount == 0 {
		errs = append(errs, field.Required(here, ""))
	} else if g != nil {
		errs = append(errs, validate.Minimum(context.Background(), operation.Operation{}, here, &g.MinCount, nil, 1)...)
	}
	if m := t.DisruptionMode; m != nil {
		errs = append(errs, validateOneMember(fldPath.Child("disruptionMode"), member{"single", m.Single != nil},
			member{"all", m.All != nil})...)
	}
	errs = append(errs, validateFormat(t.PriorityClassName, fldPath.Child("priorityClassName"), validate.LongName)...)
	if t.Priority != nil {
		errs = append(errs, validate.Maximum(context.Background(), operation.Operation{}, fldPath.Child("priority"),
			t.Priority, nil, MaxUserPriority)...)
	}
	return errs
}

// member is the name of a union's member, and whether the member is set.
type member struct {
	name string
	set  bool
}

func validateOneMember(fldPath *field.Path, members ...member) field.ErrorList {
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
		return field.ErrorList{field.Invalid(fldPath, "", "must specify one of: "+all)}
	}
	return field.ErrorList{field.Invalid(fldPath, fmt.Sprintf("{%s}", set), "must specify exactly one of: "+all)}
}

// validateGroupTemplatesUpdate validates the mutable fields of PodGroup templates, and returns
// errors for changes of other fields. Templates may not be added or removed.
func validateGroupTemplatesUpdate(list, old []schedulingv1beta1.PodGroupTemplate, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	find := func(in []schedulingv1beta1.PodGroupTemplate, name string) *schedulingv1beta1.PodGroupTemplate {
		if i := slices.IndexFunc(in, func(t schedulingv1beta1.PodGroupTemplate) bool {
			return t.Name == name
		}); i >= 0 {
			return &in[i]
		}
		return nil
	}
	for i := range list {
		updated, previous, here := &list[i], find(old, list[i].Name), fldPath.Index(i)
		if previous == nil {
			errs = append(errs, field.Forbidden(here, "item may not be added"))
			continue
		}
		errs = append(errs, validatePolicyUpdate(&updated.SchedulingPolicy, &previous.SchedulingPolicy,
			here.Child("schedulingPolicy"))...)
		errs = append(errs, validateUnchanged(updated.DisruptionMode, previous.DisruptionMode,
			here.Child("disruptionMode"))...)
		errs = append(errs, validateUnchanged(updated.PriorityClassName, previous.PriorityClassName,
			here.Child("priorityClassName"))...)
		errs = append(errs, validateUnchanged(updated.Priority, previous.Priority, here.Child("priority"))...)
	}
	for i := range old {
		if find(list, old[i].Name) == nil {
			errs = append(errs, field.Forbidden(fldPath, "item may not be removed"))
		}
	}
	return errs
}

// validatePolicyUpdate returns an error if the type of the scheduling policy has changed. The
// minCount of a gang may change.
func validatePolicyUpdate(
	updated, old *schedulingv1beta1.PodGroupSchedulingPolicy, fldPath *field.Path,
) field.ErrorList {
	errs := validateUnchanged(updated.Basic, old.Basic, fldPath.Child("basic"))
	return append(errs, validate.UpdatePointer(context.Background(), operation.Operation{Type: operation.Update},
		fldPath.Child("gang"),
		updated.Gang, old.Gang, validate.NoSet, validate.NoUnset)...)
}
