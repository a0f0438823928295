package apps

import (
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// StatefulSetKind returns the definition of the kind StatefulSet.
func StatefulSetKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: appsv1.SchemeGroupVersion, Kind: "StatefulSet", Plural: "statefulsets", Singular: "statefulset",
		// pod names are derived from the StatefulSet's name
		Short: []string{"sts"}, InAllCategory: true, Rule: apivalidation.NameIsDNSLabel,
	}, func(l *appsv1.StatefulSetList) *[]appsv1.StatefulSet { return &l.Items })
	k.Writes.Default = builder.Default(defaultStatefulSet)
	builder.SeparateSpecAndStatus(k, func(s *appsv1.StatefulSet) *appsv1.StatefulSetSpec { return &s.Spec },
		func(s *appsv1.StatefulSet) *appsv1.StatefulSetStatus { return &s.Status })
	builder.AddValidation(k, func(s *appsv1.StatefulSet) field.ErrorList {
		return append(validateStatefulSetSpec(&s.Spec, field.NewPath("spec")),
			validateBoolAnnotations(s, api.RestartAnnotation, api.RebalanceAnnotation)...)
	})
	// The name is checked only on create, because it is immutable.
	k.Validation.Create = builder.CreateValidation(func(s *appsv1.StatefulSet) field.ErrorList {
		if s.Spec.ServiceName == "" {
			return nil
		}
		return fieldrules.InvalidErrors(field.NewPath("spec", "serviceName"), s.Spec.ServiceName,
			validation.IsDNS1123Label(s.Spec.ServiceName))
	})
	builder.AddUpdateValidation(k, validateStatefulSetUpdate)
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		updated, previous := &obj.(*appsv1.StatefulSet).Status, &old.(*appsv1.StatefulSet).Status
		return append(validateMeta(obj, old), validateStatefulSetStatus(updated, previous, field.NewPath("status"))...)
	}
	builder.AddScale(k, builder.ScaleAccessors{
		Replicas: func(o api.Object) **int32 { return &o.(*appsv1.StatefulSet).Spec.Replicas },
		Current:  func(o api.Object) int32 { return o.(*appsv1.StatefulSet).Status.Replicas },
		Selector: func(o api.Object) *metav1.LabelSelector { return o.(*appsv1.StatefulSet).Spec.Selector },
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Ready"), builder.AgeColumn,
		builder.WideColumn("Containers"), builder.WideColumn("Images"))
	k.Lists.Row = builder.Row(func(s *appsv1.StatefulSet, now time.Time) []any {
		containers, images := podspec.ContainersAndImages(&s.Spec.Template.Spec)
		return []any{s.Name, fmt.Sprintf("%d/%d", s.Status.ReadyReplicas, ptr.Deref(s.Spec.Replicas, 0)),
			builder.Age(s, now), containers, images}
	})
	return k
}

func defaultStatefulSet(o *appsv1.StatefulSet) {
	s := &o.Spec
	builder.SetDefault(&s.PodManagementPolicy, appsv1.OrderedReadyPodManagement)
	u := &s.UpdateStrategy
	if u.Type == "" {
		u.Type = appsv1.RollingUpdateStatefulSetStrategyType
		builder.SetDefaultPtr(&u.RollingUpdate, appsv1.RollingUpdateStatefulSetStrategy{})
	}
	if u.Type == appsv1.RollingUpdateStatefulSetStrategyType && u.RollingUpdate != nil {
		builder.SetDefaultPtr(&u.RollingUpdate.Partition, 0)
		builder.SetDefaultPtr(&u.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
	}
	builder.SetDefaultPtr(&s.PersistentVolumeClaimRetentionPolicy,
		appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{})
	builder.SetDefault(&s.PersistentVolumeClaimRetentionPolicy.WhenDeleted,
		appsv1.RetainPersistentVolumeClaimRetentionPolicyType)
	builder.SetDefault(&s.PersistentVolumeClaimRetentionPolicy.WhenScaled,
		appsv1.RetainPersistentVolumeClaimRetentionPolicyType)
	builder.SetDefaultPtr(&s.Replicas, 1)
	builder.SetDefaultPtr(&s.RevisionHistoryLimit, 10)
	podspec.DefaultPodTemplate(&s.Template)
	for i := range s.VolumeClaimTemplates {
		c := &s.VolumeClaimTemplates[i]
		builder.SetDefault(&c.APIVersion, "v1")
		builder.SetDefault(&c.Kind, "PersistentVolumeClaim")
		podspec.DefaultClaim(c)
	}
}

func validateStatefulSetSpec(s *appsv1.StatefulSetSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch s.PodManagementPolicy {
	case "":
		errs = append(errs, field.Required(fldPath.Child("podManagementPolicy"), ""))
	case appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement:
	default:
		errs = append(errs, field.Invalid(fldPath.Child("podManagementPolicy"), s.PodManagementPolicy,
			fmt.Sprintf("must be '%s' or '%s'", appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement)))
	}
	errs = append(errs, validateStatefulSetStrategy(&s.UpdateStrategy, fldPath.Child("updateStrategy"))...)
	if p := s.PersistentVolumeClaimRetentionPolicy; p != nil {
		here := fldPath.Child("persistentVolumeClaimRetentionPolicy")
		errs = append(errs, validateRetention(p.WhenDeleted, here.Child("whenDeleted"))...)
		errs = append(errs, validateRetention(p.WhenScaled, here.Child("whenScaled"))...)
	}
	errs = append(errs, fieldrules.ValidateNonNegative(ptr.Deref(s.Replicas, 0), fldPath.Child("replicas"))...)
	errs = append(errs, fieldrules.ValidateNonNegative(s.MinReadySeconds, fldPath.Child("minReadySeconds"))...)
	if s.Ordinals != nil {
		errs = append(errs, fieldrules.ValidateNonNegative(s.Ordinals.Start, fldPath.Child("ordinals", "start"))...)
	}
	errs = append(errs, validateClaimTemplates(s.VolumeClaimTemplates, fldPath.Child("volumeClaimTemplates"))...)
	return append(errs, validateSelected("StatefulSet", s.Selector, templateWithClaims(s), fldPath)...)
}

func validateStatefulSetStrategy(u *appsv1.StatefulSetUpdateStrategy, fldPath *field.Path) field.ErrorList {
	switch u.Type {
	case "":
		return field.ErrorList{field.Required(fldPath, "")}
	case appsv1.OnDeleteStatefulSetStrategyType:
		if u.RollingUpdate != nil {
			return field.ErrorList{field.Invalid(fldPath.Child("rollingUpdate"), u.RollingUpdate,
				fmt.Sprintf("only allowed for updateStrategy '%s'", appsv1.RollingUpdateStatefulSetStrategyType))}
		}
		return nil
	case appsv1.RollingUpdateStatefulSetStrategyType:
	default:
		return field.ErrorList{field.Invalid(fldPath, *u,
			fmt.Sprintf("must be '%s' or '%s'", appsv1.RollingUpdateStatefulSetStrategyType,
				appsv1.OnDeleteStatefulSetStrategyType))}
	}
	if u.RollingUpdate == nil {
		return nil
	}
	fldPath = fldPath.Child("rollingUpdate")
	errs := fieldrules.ValidateNonNegative(ptr.Deref(u.RollingUpdate.Partition, 0), fldPath.Child("partition"))
	if m := u.RollingUpdate.MaxUnavailable; m != nil {
		errs = append(errs, fieldrules.ValidateIntOrPercent(*m, fldPath.Child("maxUnavailable"))...)
		if fieldrules.IsZero(*m) {
			errs = append(errs, field.Invalid(fldPath.Child("maxUnavailable"), m.String(), "cannot be 0"))
		}
		errs = append(errs, validateMaxPercent(*m, fldPath.Child("maxUnavailable"))...)
	}
	return errs
}

// validateMaxPercent returns an error for a percentage above 100.
func validateMaxPercent(v intstr.IntOrString, fldPath *field.Path) field.ErrorList {
	if n, ok := fieldrules.PercentOf(v); ok && n > 100 {
		return field.ErrorList{field.Invalid(fldPath, v.String(), "must not be greater than 100%")}
	}
	return nil
}

func validateRetention(p appsv1.PersistentVolumeClaimRetentionPolicyType, fldPath *field.Path) field.ErrorList {
	known := []appsv1.PersistentVolumeClaimRetentionPolicyType{
		appsv1.RetainPersistentVolumeClaimRetentionPolicyType, appsv1.DeletePersistentVolumeClaimRetentionPolicyType,
	}
	for _, k := range known {
		if p == k {
			return nil
		}
	}
	return field.ErrorList{field.NotSupported(fldPath, p, known)}
}

// validateClaimTemplates validates the templates of the claims that each pod gets. A claim with an
// invalid template could never be created, and the pods would wait forever.
func validateClaimTemplates(claims []corev1.PersistentVolumeClaim, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i := range claims {
		c, here := &claims[i], fldPath.Index(i)
		switch name := here.Child("metadata", "name"); {
		case c.Name == "":
			errs = append(errs, field.Required(name, ""))
		case seen[c.Name]:
			errs = append(errs, field.Duplicate(name, c.Name))
		default:
			errs = append(errs, fieldrules.InvalidErrors(name, c.Name, apivalidation.NameIsDNSLabel(c.Name, false))...)
		}
		seen[c.Name] = true
		errs = append(errs, podspec.ValidateClaimSpec(&c.Spec, here.Child("spec"))...)
	}
	return errs
}

// templateWithClaims returns the pod template with a volume for each claim template. It replaces
// volumes with the same name.
func templateWithClaims(s *appsv1.StatefulSetSpec) *corev1.PodTemplateSpec {
	if len(s.VolumeClaimTemplates) == 0 {
		return &s.Template
	}
	t := s.Template
	claimed := map[string]bool{}
	t.Spec.Volumes = nil
	for i := range s.VolumeClaimTemplates {
		claimed[s.VolumeClaimTemplates[i].Name] = true
	}
	for _, v := range s.Template.Spec.Volumes {
		if !claimed[v.Name] {
			t.Spec.Volumes = append(t.Spec.Volumes, v)
		}
	}
	for _, name := range fieldrules.SortedKeys(claimed) {
		if len(apivalidation.NameIsDNSLabel(name, false)) > 0 {
			continue // reported for the claim template
		}
		t.Spec.Volumes = append(t.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name},
		}})
	}
	return &t
}

// validateStatefulSetUpdate returns an error if the update changes fields of the spec that cannot
// be applied to existing pods.
func validateStatefulSetUpdate(obj, old *appsv1.StatefulSet) field.ErrorList {
	updated := obj.Spec
	updated.Replicas, updated.Template, updated.UpdateStrategy = old.Spec.Replicas, old.Spec.Template,
		old.Spec.UpdateStrategy
	updated.MinReadySeconds, updated.Ordinals, updated.RevisionHistoryLimit = old.Spec.MinReadySeconds,
		old.Spec.Ordinals, old.Spec.RevisionHistoryLimit
	updated.PersistentVolumeClaimRetentionPolicy = old.Spec.PersistentVolumeClaimRetentionPolicy
	if fieldrules.SemanticEqual(updated, old.Spec) {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec"),
		"updates to statefulset spec for fields other than 'replicas', 'ordinals', "+
			"'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and "+
			"'minReadySeconds' are forbidden")}
}

func validateStatefulSetStatus(s, old *appsv1.StatefulSetStatus, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateNonNegative(s.Replicas, fldPath.Child("replicas"))
	errs = append(errs, fieldrules.ValidateNonNegative(s.ObservedGeneration, fldPath.Child("observedGeneration"))...)
	errs = append(errs, fieldrules.ValidateReplicaParts(s.Replicas, fldPath, map[string]int32{
		"readyReplicas": s.ReadyReplicas, "currentReplicas": s.CurrentReplicas, "updatedReplicas": s.UpdatedReplicas,
		"availableReplicas": s.AvailableReplicas,
	})...)
	if s.AvailableReplicas > s.ReadyReplicas {
		errs = append(errs, field.Invalid(fldPath.Child("availableReplicas"), s.AvailableReplicas,
			"cannot be greater than status.readyReplicas"))
	}
	return append(errs, validateCollisionCount(s.CollisionCount, old.CollisionCount, fldPath)...)
}

// validateCollisionCount returns an error if a collision count is negative or lower than the old
// count.
func validateCollisionCount(count, old *int32, fldPath *field.Path) field.ErrorList {
	fldPath = fldPath.Child("collisionCount")
	errs := fieldrules.ValidateNonNegative(ptr.Deref(count, 0), fldPath)
	if old != nil && ptr.Deref(count, 0) < *old {
		errs = append(errs, field.Invalid(fldPath, ptr.Deref(count, 0), "cannot be decremented"))
	}
	return errs
}
