package core

import (
	"path"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
	"keelson.dev/keelson/internal/saturate"
)

// PersistentVolumeKind returns the definition of the kind PersistentVolume.
func PersistentVolumeKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "PersistentVolume", Plural: "persistentvolumes",
		Singular: "persistentvolume",
		Short:    []string{"pv"}, ClusterScoped: true,
	}, func(l *corev1.PersistentVolumeList) *[]corev1.PersistentVolume { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(func(v *corev1.PersistentVolume) {
		builder.SetDefault(&v.Status.Phase, corev1.VolumePending)
		builder.SetDefault(&v.Spec.PersistentVolumeReclaimPolicy, corev1.PersistentVolumeReclaimRetain)
		builder.SetDefaultPtr(&v.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
		if h := v.Spec.HostPath; h != nil {
			builder.SetDefaultPtr(&h.Type, corev1.HostPathUnset)
		}
		if d := v.Spec.ISCSI; d != nil {
			builder.SetDefault(&d.ISCSIInterface, "default")
		}
		podspec.RoundResources(v.Spec.Capacity)
	})
	builder.SeparateStatus(k, func(o *corev1.PersistentVolume) *corev1.PersistentVolumeStatus { return &o.Status },
		builder.Accessors[*corev1.PersistentVolume]{
			Spec:     func(v *corev1.PersistentVolume) any { return v.Spec },
			CopySpec: func(obj, old *corev1.PersistentVolume) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *corev1.PersistentVolume) {
				obj.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumePending}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.PrepareCreate(k, func(v *corev1.PersistentVolume) {
		v.Generation = 0
		if !v.CreationTimestamp.IsZero() {
			v.Status.LastPhaseTransitionTime = v.CreationTimestamp.DeepCopy()
		}
	})
	status := k.Subresources["status"]
	keep := status.PrepareUpdate
	status.PrepareUpdate = func(obj, old api.Object) {
		keep(obj, old)
		updated, previous := &obj.(*corev1.PersistentVolume).Status, &old.(*corev1.PersistentVolume).Status
		if updated.Phase == previous.Phase && updated.LastPhaseTransitionTime == nil {
			updated.LastPhaseTransitionTime = previous.LastPhaseTransitionTime.DeepCopy()
		}
	}
	builder.AddValidation(k, validatePersistentVolume)
	builder.AddUpdateValidation(k, validatePersistentVolumeUpdate)
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Capacity"),
		builder.StringColumn("Access Modes"), builder.StringColumn("Reclaim Policy"), builder.StringColumn("Status"),
		builder.StringColumn("Claim"),
		builder.StringColumn("StorageClass"), builder.StringColumn("VolumeAttributesClass"),
		builder.StringColumn("Reason"), builder.AgeColumn, builder.WideColumn("VolumeMode"))
	k.Lists.Row = builder.Row(func(v *corev1.PersistentVolume, now time.Time) []any {
		claim := ""
		if r := v.Spec.ClaimRef; r != nil {
			claim = r.Namespace + "/" + r.Name
		}
		class := v.Annotations[corev1.BetaStorageClassAnnotation]
		if class == "" {
			class = v.Spec.StorageClassName
		}
		phase := string(v.Status.Phase)
		if v.DeletionTimestamp != nil {
			phase = "Terminating"
		}
		return []any{v.Name, quantityText(v.Spec.Capacity, corev1.ResourceStorage), accessModes(v.Spec.AccessModes),
			string(v.Spec.PersistentVolumeReclaimPolicy), phase, claim, class,
			valueOrUnset(v.Spec.VolumeAttributesClassName),
			v.Status.Reason, builder.Age(v, now), valueOrUnset(v.Spec.VolumeMode)}
	})
	k.Lists.Fields = builder.Fields(func(v *corev1.PersistentVolume) fields.Set {
		return fields.Set{"status.phase": string(v.Status.Phase), "spec.storageClassName": v.Spec.StorageClassName}
	})
	return k
}

func validatePersistentVolume(v *corev1.PersistentVolume) field.ErrorList {
	spec := field.NewPath("spec")
	errs := podspec.ValidateAccessModes(v.Spec.AccessModes, spec.Child("accessModes"), "")
	errs = append(errs, validateCapacity(v.Spec.Capacity, spec.Child("capacity"))...)
	errs = append(errs, fieldrules.ValidateOneOf(v.Spec.PersistentVolumeReclaimPolicy,
		spec.Child("persistentVolumeReclaimPolicy"),
		corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle,
		corev1.PersistentVolumeReclaimRetain)...)
	if h := v.Spec.HostPath; h != nil && path.Clean(h.Path) == "/" &&
		v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRecycle {
		errs = append(errs, field.Forbidden(spec.Child("persistentVolumeReclaimPolicy"),
			"may not be 'recycle' for a hostPath mount of '/'"))
	}
	errs = append(errs, podspec.ValidateVolumeMode(v.Spec.VolumeMode, spec.Child("volumeMode"))...)
	errs = append(errs, validateVolumeAttributesOf(&v.Spec, spec)...)
	if c := v.Spec.StorageClassName; c != "" {
		errs = append(errs, fieldrules.InvalidErrors(spec.Child("storageClassName"), c,
			validation.NameIsDNSSubdomain(c, false))...)
	}
	errs = append(errs, validatePVSource(&v.Spec, v.Name, spec)...)
	if a := v.Spec.NodeAffinity; a != nil {
		fldPath := spec.Child("nodeAffinity", "required")
		if a.Required == nil {
			errs = append(errs, field.Required(fldPath, "must specify required node constraints"))
		} else {
			errs = append(errs, podspec.ValidateNodeSelector(a.Required, fldPath)...)
		}
	}
	return errs
}

func validatePersistentVolumeUpdate(obj, old *corev1.PersistentVolume) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	source := obj.Spec.PersistentVolumeSource.DeepCopy()
	if updated, previous := source.CSI, old.Spec.CSI; updated != nil && previous != nil &&
		previous.ControllerExpandSecretRef == nil {
		updated.ControllerExpandSecretRef = nil // the reference may be set later
	}
	if changed := podspec.ChangedFields(*source, old.Spec.PersistentVolumeSource, "spec."); len(changed) > 0 {
		errs = append(errs, field.Forbidden(spec.Child("persistentvolumesource"),
			"spec.persistentvolumesource is immutable after creation\nchanged: "+strings.Join(changed, ", ")))
	}
	errs = append(errs, fieldrules.ValidateUnchanged(obj.Spec.VolumeMode, old.Spec.VolumeMode,
		field.NewPath("volumeMode"))...)
	if previous := old.Spec.NodeAffinity; previous != nil && !fieldrules.SemanticEqual(obj.Spec.NodeAffinity,
		renameBetaLabels(previous, obj.Spec.NodeAffinity)) {
		errs = append(errs, field.Invalid(field.NewPath("nodeAffinity"), obj.Spec.NodeAffinity,
			validation.FieldImmutableErrorMsg+", except for updating from beta label to GA"))
	}
	if old.Spec.VolumeAttributesClassName != nil && obj.Spec.VolumeAttributesClassName == nil {
		errs = append(errs, field.Forbidden(spec.Child("volumeAttributesClassName"),
			"update from non-nil value to nil is forbidden"))
	}
	return errs
}

// stableLabels maps beta labels of Nodes to the labels that replaced them.
var stableLabels = map[string]string{
	corev1.LabelFailureDomainBetaZone:   corev1.LabelTopologyZone,
	corev1.LabelFailureDomainBetaRegion: corev1.LabelTopologyRegion,
	"beta.kubernetes.io/os":             corev1.LabelOSStable, "beta.kubernetes.io/arch": corev1.LabelArchStable,
	corev1.LabelInstanceType: corev1.LabelInstanceTypeStable,
}

// renameBetaLabels returns a copy of old in which beta labels are replaced with their stable names.
// It replaces a label only if updated has the stable name in the same position.
func renameBetaLabels(old, updated *corev1.VolumeNodeAffinity) *corev1.VolumeNodeAffinity {
	if old.Required == nil || updated == nil || updated.Required == nil {
		return old
	}
	old = old.DeepCopy()
	rename := func(was, is []corev1.NodeSelectorRequirement) {
		for i := range min(len(was), len(is)) {
			if stable := stableLabels[was[i].Key]; stable != "" && stable == is[i].Key {
				was[i].Key = stable
			}
		}
	}
	previous, is := old.Required.NodeSelectorTerms, updated.Required.NodeSelectorTerms
	for i := range min(len(previous), len(is)) {
		rename(previous[i].MatchExpressions, is[i].MatchExpressions)
		rename(previous[i].MatchFields, is[i].MatchFields)
	}
	return old
}

// persistentSources returns the volume sources of a PersistentVolume with their names in errors, in
// the order in which Kubernetes checks them.
func persistentSources(s *corev1.PersistentVolumeSource) []podspec.NamedSource {
	return []podspec.NamedSource{
		{Name: "hostPath", Set: s.HostPath != nil}, {Name: "gcePersistentDisk", Set: s.GCEPersistentDisk != nil},
		{Name: "awsElasticBlockStore", Set: s.AWSElasticBlockStore != nil},
		{Name: "glusterfs", Set: s.Glusterfs != nil}, {Name: "flocker", Set: s.Flocker != nil},
		{Name: "nfs", Set: s.NFS != nil}, {Name: "rbd", Set: s.RBD != nil}, {Name: "quobyte", Set: s.Quobyte != nil},
		{Name: "cephFS", Set: s.CephFS != nil}, {Name: "iscsi", Set: s.ISCSI != nil},
		{Name: "cinder", Set: s.Cinder != nil}, {Name: "fc", Set: s.FC != nil},
		{Name: "flexVolume", Set: s.FlexVolume != nil},
		{Name: "azureFile", Set: s.AzureFile != nil}, {Name: "vsphereVolume", Set: s.VsphereVolume != nil},
		{Name: "photonPersistentDisk", Set: s.PhotonPersistentDisk != nil},
		{Name: "portworxVolume", Set: s.PortworxVolume != nil}, {Name: "azureDisk", Set: s.AzureDisk != nil},
		{Name: "scaleIO", Set: s.ScaleIO != nil}, {Name: "local", Set: s.Local != nil},
		{Name: "storageos", Set: s.StorageOS != nil}, {Name: "csi", Set: s.CSI != nil},
	}
}

func validatePVSource(s *corev1.PersistentVolumeSpec, volume string, spec *field.Path) field.ErrorList {
	first, errs := podspec.ValidateOneMember(persistentSources(&s.PersistentVolumeSource), "volume", spec)
	switch first {
	case "":
		errs = append(errs, field.Required(spec, "must specify a volume type"))
	case "hostPath":
		errs = append(errs, podspec.ValidateHostPath(s.HostPath, spec.Child("hostPath"))...)
	case "local":
		if s.Local.Path == "" {
			errs = append(errs, field.Required(spec.Child("local", "path"), ""))
		}
		errs = append(errs, fieldrules.ValidateNoBacksteps(s.Local.Path, spec.Child("local", "path"))...)
		if s.NodeAffinity == nil {
			errs = append(errs, field.Required(spec.Child("nodeAffinity"), "Local volume requires node affinity"))
		}
	case "csi":
		errs = append(errs, fieldrules.ValidateDriverName(s.CSI.Driver, spec.Child("csi", "driver"))...)
		if s.CSI.VolumeHandle == "" {
			errs = append(errs, field.Required(spec.Child("csi", "volumeHandle"), ""))
		}
		errs = append(errs, validateDriverSecrets(s.CSI, spec.Child("csi"))...)
	case "nfs":
		errs = append(errs, podspec.ValidateNFS(s.NFS, spec.Child("nfs"))...)
	case "iscsi":
		errs = append(errs, podspec.ValidateISCSIVolume(s.ISCSI, volume, spec.Child("iscsi"))...)
	}
	return errs
}

// validateDriverSecrets validates the references to Secrets that a CSI driver receives. As in
// Kubernetes, nodeStageSecretRef is not checked.
func validateDriverSecrets(c *corev1.CSIPersistentVolumeSource, csi *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, s := range []struct {
		field string
		ref   *corev1.SecretReference
	}{
		{"controllerPublishSecretRef", c.ControllerPublishSecretRef},
		{"controllerExpandSecretRef", c.ControllerExpandSecretRef},
		{"nodePublishSecretRef", c.NodePublishSecretRef}, {"nodeExpandSecretRef", c.NodeExpandSecretRef},
	} {
		if s.ref == nil {
			continue
		}
		name, namespace := csi.Child(s.field, "name"), csi.Child(s.field, "namespace")
		if s.ref.Name == "" {
			errs = append(errs, field.Required(name, ""))
		} else {
			errs = append(errs, fieldrules.InvalidErrors(name, s.ref.Name,
				validation.NameIsDNSSubdomain(s.ref.Name, false))...)
		}
		if s.ref.Namespace == "" {
			errs = append(errs, field.Required(namespace, ""))
		} else {
			errs = append(errs, fieldrules.InvalidErrors(namespace, s.ref.Namespace,
				validation.NameIsDNSLabel(s.ref.Namespace, false))...)
		}
	}
	return errs
}

// validateCapacity validates the capacity of a volume. Its only resource must be storage.
func validateCapacity(capacity corev1.ResourceList, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(capacity) == 0 {
		errs = append(errs, field.Required(fldPath, ""))
	}
	if _, ok := capacity[corev1.ResourceStorage]; !ok || len(capacity) > 1 {
		errs = append(errs, field.NotSupported(fldPath, capacity, []corev1.ResourceName{corev1.ResourceStorage}))
	}
	for _, name := range fieldrules.SortedKeys(capacity) {
		q, here := capacity[name], fldPath.Key(string(name))
		if q.Sign() < 0 {
			errs = append(errs, field.Invalid(here, saturate.Value(&q), "must be a valid resource quantity"))
		}
		if q.Sign() <= 0 {
			errs = append(errs, field.Invalid(here, q.String(), "must be greater than zero"))
		}
	}
	return errs
}

// shortModes are the abbreviations of access modes in table rows.
var shortModes = []struct {
	mode  corev1.PersistentVolumeAccessMode
	short string
}{
	{corev1.ReadWriteOnce, "RWO"}, {corev1.ReadOnlyMany, "ROX"}, {corev1.ReadWriteMany,
		"RWX"}, {corev1.ReadWriteOncePod, "RWOP"},
}

func accessModes(modes []corev1.PersistentVolumeAccessMode) string {
	has := map[corev1.PersistentVolumeAccessMode]bool{}
	for _, m := range modes {
		has[m] = true
	}
	var out []string
	for _, s := range shortModes {
		if has[s.mode] {
			out = append(out, s.short)
		}
	}
	return strings.Join(out, ",")
}

func quantityText(l corev1.ResourceList, name corev1.ResourceName) string {
	q, ok := l[name]
	if !ok {
		return ""
	}
	return q.String()
}

func valueOrUnset[T ~string](p *T) string {
	if p == nil || *p == "" {
		return builder.Unset
	}
	return string(*p)
}

// validateVolumeAttributesOf validates the name of a volume's VolumeAttributesClass. Only CSI
// volumes may have one.
func validateVolumeAttributesOf(s *corev1.PersistentVolumeSpec, spec *field.Path) field.ErrorList {
	if s.VolumeAttributesClassName == nil {
		return nil
	}
	fldPath, class := spec.Child("volumeAttributesClassName"), *s.VolumeAttributesClassName
	var errs field.ErrorList
	if class == "" {
		errs = append(errs, field.Required(fldPath, "an empty string is disallowed"))
	} else {
		errs = append(errs, fieldrules.InvalidErrors(fldPath, class, validation.NameIsDNSSubdomain(class, false))...)
	}
	if s.CSI == nil {
		errs = append(errs, field.Required(spec.Child("csi"),
			"has to be specified when using volumeAttributesClassName"))
	}
	return errs
}
