package kinds

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Life of a projected service account token, in seconds.
const (
	minTokenSeconds = 10 * 60
	maxTokenSeconds = 1 << 32
)

// Fields of the pod that its own containers may be told, by environment and by file.
var (
	envFields = []string{"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
		"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"}
	fileFields = []string{"metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"}
)

// validateVolumes judges the volumes and returns them by name, for the mounts.
func validateVolumes(volumes []corev1.Volume, at *field.Path) (map[string]corev1.VolumeSource, field.ErrorList) {
	var errs field.ErrorList
	byName := make(map[string]corev1.VolumeSource, len(volumes))
	for i := range volumes {
		v, here := &volumes[i], at.Index(i)
		switch _, twice := byName[v.Name]; {
		case v.Name == "":
			errs = append(errs, field.Required(here.Child("name"), ""))
		case twice:
			errs = append(errs, field.Duplicate(here.Child("name"), v.Name))
		default:
			errs = append(errs, invalid(here.Child("name"), v.Name, utilvalidation.IsDNS1123Label(v.Name))...)
		}
		byName[v.Name] = v.VolumeSource
		errs = append(errs, validateVolumeSource(&v.VolumeSource, here)...)
		if d := v.ISCSI; d != nil {
			errs = append(errs, validateInlineISCSI(d, v.Name, here.Child("iscsi"))...)
		}
	}
	return byName, errs
}

func validateVolumeSource(v *corev1.VolumeSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch n := countSet(*v); {
	case n == 0:
		return field.ErrorList{field.Required(at, "must specify a volume type")}
	case n > 1:
		errs = append(errs, field.Forbidden(at, "may not specify more than 1 volume type"))
	}
	switch {
	case v.EmptyDir != nil:
		if s := v.EmptyDir.SizeLimit; s != nil && s.Sign() < 0 {
			errs = append(errs, field.Forbidden(at.Child("emptyDir", "sizeLimit"), "SizeLimit field must be a valid resource quantity"))
		}
		if m := v.EmptyDir.Medium; m != corev1.StorageMediumDefault &&
			!strings.HasPrefix(string(m), string(corev1.StorageMediumHugePages)) {
			errs = append(errs, oneOf(m, at.Child("emptyDir", "medium"), corev1.StorageMediumMemory)...)
		}
	case v.HostPath != nil:
		errs = append(errs, validateHostPath(v.HostPath, at.Child("hostPath"))...)
	case v.Secret != nil:
		errs = append(errs, validateNamedFiles(v.Secret.SecretName, "secretName", v.Secret.DefaultMode, v.Secret.Items, at.Child("secret"))...)
	case v.ConfigMap != nil:
		errs = append(errs, validateNamedFiles(v.ConfigMap.Name, "name", v.ConfigMap.DefaultMode, v.ConfigMap.Items, at.Child("configMap"))...)
	case v.DownwardAPI != nil:
		errs = append(errs, validateMode(v.DownwardAPI.DefaultMode, at.Child("downwardAPI", "defaultMode"))...)
		errs = append(errs, validateDownward(v.DownwardAPI.Items, at.Child("downwardAPI", "items"))...)
	case v.PersistentVolumeClaim != nil:
		if v.PersistentVolumeClaim.ClaimName == "" {
			errs = append(errs, field.Required(at.Child("persistentVolumeClaim", "claimName"), ""))
		}
	case v.Ephemeral != nil:
		here := at.Child("ephemeral", "volumeClaimTemplate")
		if v.Ephemeral.VolumeClaimTemplate == nil {
			errs = append(errs, field.Required(here, ""))
		} else {
			errs = append(errs, validateOwnClaimMeta(&v.Ephemeral.VolumeClaimTemplate.ObjectMeta, here.Child("metadata"))...)
			errs = append(errs, validateClaimSpec(&v.Ephemeral.VolumeClaimTemplate.Spec, here.Child("spec"))...)
		}
	case v.CSI != nil:
		errs = append(errs, validateDriverName(v.CSI.Driver, at.Child("csi", "driver"))...)
	case v.NFS != nil:
		errs = append(errs, validateNFS(v.NFS, at.Child("nfs"))...)
	case v.Projected != nil:
		errs = append(errs, validateProjected(v.Projected, at.Child("projected"))...)
	}
	return errs
}

// validateOwnClaimMeta lets a claim that is made for a pod have labels and annotations: all else is the pod's to say.
func validateOwnClaimMeta(m *metav1.ObjectMeta, at *field.Path) field.ErrorList {
	errs := validateTemplateMeta(m, at)
	const no = "cannot be set for an ephemeral volume"
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"name", m.Name != ""}, {"generateName", m.GenerateName != ""}, {"namespace", m.Namespace != ""}, {"selfLink", m.SelfLink != ""},
		{"uid", m.UID != ""}, {"resourceVersion", m.ResourceVersion != ""}, {"generation", m.Generation != 0},
		{"creationTimestamp", !m.CreationTimestamp.IsZero()}, {"deletionTimestamp", m.DeletionTimestamp != nil},
		{"deletionGracePeriodSeconds", m.DeletionGracePeriodSeconds != nil}, {"ownerReferences", m.OwnerReferences != nil},
		{"finalizers", m.Finalizers != nil}, {"managedFields", m.ManagedFields != nil},
	} {
		if f.set {
			errs = append(errs, field.Forbidden(at.Child(f.name), no))
		}
	}
	return errs
}

// validateOwnClaims judges the names of the claims that are made for a pod, which has a name of its own by now.
func validateOwnClaims(p *corev1.Pod, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	named := map[string]bool{}
	for i := range p.Spec.Volumes {
		if c := p.Spec.Volumes[i].PersistentVolumeClaim; c != nil {
			named[c.ClaimName] = true
		}
	}
	for i := range p.Spec.Volumes {
		v := &p.Spec.Volumes[i]
		if v.Ephemeral == nil || p.Name == "" {
			continue
		}
		claim := p.Name + "-" + v.Name
		for _, wrong := range validation.NameIsDNSSubdomain(claim, false) {
			errs = append(errs, field.Invalid(at.Index(i).Child("name"), v.Name, fmt.Sprintf("PVC name %q: %v", claim, wrong)))
		}
		if named[claim] {
			errs = append(errs, field.Invalid(at.Index(i), claim, "conflicting PVC names: the same name is used by a persistentVolumeClaim volume"))
		}
	}
	return errs
}

func validateHostPath(h *corev1.HostPathVolumeSource, at *field.Path) field.ErrorList {
	if h.Path == "" {
		return field.ErrorList{field.Required(at.Child("path"), "")}
	}
	errs := noBacksteps(h.Path, at.Child("path"))
	return append(errs, listed(val(h.Type), at.Child("type"), corev1.HostPathUnset, corev1.HostPathBlockDev, corev1.HostPathCharDev,
		corev1.HostPathDirectory, corev1.HostPathDirectoryOrCreate, corev1.HostPathFile, corev1.HostPathFileOrCreate,
		corev1.HostPathSocket)...)
}

func validateNFS(n *corev1.NFSVolumeSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if n.Server == "" {
		errs = append(errs, field.Required(at.Child("server"), ""))
	}
	if n.Path == "" {
		errs = append(errs, field.Required(at.Child("path"), ""))
	} else if !path.IsAbs(n.Path) {
		errs = append(errs, field.Invalid(at.Child("path"), n.Path, "must be an absolute path"))
	}
	return errs
}

func validateMode(m *int32, at *field.Path) field.ErrorList {
	if m != nil && (*m < 0 || *m > 0o777) {
		return field.ErrorList{field.Invalid(at, *m, "must be a number between 0 and 0777 (octal), both inclusive")}
	}
	return nil
}

func validateNamedFiles(name, nameField string, mode *int32, items []corev1.KeyToPath, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(at.Child(nameField), ""))
	}
	errs = append(errs, validateMode(mode, at.Child("defaultMode"))...)
	return append(errs, validateItems(items, at.Child("items"))...)
}

func validateItems(items []corev1.KeyToPath, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, item := range items {
		here := at.Index(i)
		if item.Key == "" {
			errs = append(errs, field.Required(here.Child("key"), ""))
		}
		errs = append(errs, validateFilePath(item.Path, here.Child("path"))...)
		errs = append(errs, validateMode(item.Mode, here.Child("mode"))...)
	}
	return errs
}

// validateFilePath judges where in a volume a file is put. Names that start with
// ".." are the links by which a volume is renewed in one step.
func validateFilePath(p string, at *field.Path) field.ErrorList {
	if p == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	errs := validateDescending(p, at)
	if strings.HasPrefix(p, "..") && len(errs) == 0 {
		errs = append(errs, field.Invalid(at, p, "must not start with '..'"))
	}
	return errs
}

func validateDownward(items []corev1.DownwardAPIVolumeFile, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, item := range items {
		here := at.Index(i)
		errs = append(errs, validateFilePath(item.Path, here.Child("path"))...)
		errs = append(errs, validateMode(item.Mode, here.Child("mode"))...)
		switch {
		case item.FieldRef == nil && item.ResourceFieldRef == nil:
			errs = append(errs, field.Required(here, "one of fieldRef and resourceFieldRef is required"))
		case item.FieldRef != nil && item.ResourceFieldRef != nil:
			errs = append(errs, field.Invalid(here, "resource", "fieldRef and resourceFieldRef can not be specified simultaneously"))
		case item.FieldRef != nil:
			errs = append(errs, validateFieldRef(item.FieldRef, fileFields, here.Child("fieldRef"))...)
		case item.ResourceFieldRef.ContainerName == "":
			errs = append(errs, field.Required(here.Child("resourceFieldRef", "containerName"), ""))
		default:
			errs = append(errs, validateResourceRef(item.ResourceFieldRef, here.Child("resourceFieldRef"))...)
		}
	}
	return errs
}

func validateFieldRef(r *corev1.ObjectFieldSelector, allowed []string, at *field.Path) field.ErrorList {
	if r.FieldPath == "" {
		return field.ErrorList{field.Required(at.Child("fieldPath"), "")}
	}
	if r.APIVersion != "v1" {
		return field.ErrorList{field.NotSupported(at.Child("apiVersion"), r.APIVersion, []string{"v1"})}
	}
	if key, ok := subscriptOf(r.FieldPath, "metadata.annotations"); ok {
		return invalid(at, strings.ToLower(key), utilvalidation.IsQualifiedName(strings.ToLower(key)))
	}
	if key, ok := subscriptOf(r.FieldPath, "metadata.labels"); ok {
		return invalid(at, key, utilvalidation.IsQualifiedName(key))
	}
	if !slices.Contains(knownFields, r.FieldPath) {
		return field.ErrorList{field.Invalid(at.Child("fieldPath"), r.FieldPath,
			"error converting fieldPath: field label not supported: "+r.FieldPath)}
	}
	return oneOf(r.FieldPath, at.Child("fieldPath"), allowed...)
}

// knownFields are the fields of a pod that a reference can name anywhere. Each use allows some of them.
var knownFields = strings.Fields("metadata.annotations metadata.labels metadata.name metadata.namespace metadata.uid spec.nodeName " +
	"spec.restartPolicy spec.serviceAccountName spec.schedulerName status.phase status.hostIP status.hostIPs status.podIP status.podIPs")

// subscriptOf returns the key of a path of the form prefix['key'].
func subscriptOf(path, prefix string) (string, bool) {
	key, ok := strings.CutPrefix(path, prefix+"['")
	if !ok {
		return "", false
	}
	return strings.CutSuffix(key, "']")
}

func validateProjected(p *corev1.ProjectedVolumeSource, at *field.Path) field.ErrorList {
	errs := validateMode(p.DefaultMode, at.Child("defaultMode"))
	errs = append(errs, validateProjectedPaths(p, at)...)
	for i := range p.Sources {
		s, here := &p.Sources[i], at.Child("sources").Index(i)
		switch n := countSet(*s); {
		case n == 0:
			errs = append(errs, field.Required(here, "may not be empty"))
			continue
		case n > 1:
			errs = append(errs, field.Forbidden(here, "may not specify more than 1 volume type"))
		}
		switch {
		case s.Secret != nil:
			errs = append(errs, validateNamedFiles(s.Secret.Name, "name", nil, s.Secret.Items, here.Child("secret"))...)
		case s.ConfigMap != nil:
			errs = append(errs, validateNamedFiles(s.ConfigMap.Name, "name", nil, s.ConfigMap.Items, here.Child("configMap"))...)
		case s.DownwardAPI != nil:
			errs = append(errs, validateDownward(s.DownwardAPI.Items, here.Child("downwardAPI", "items"))...)
		case s.ServiceAccountToken != nil:
			t, token := s.ServiceAccountToken, here.Child("serviceAccountToken")
			if n := val(t.ExpirationSeconds); n < minTokenSeconds {
				errs = append(errs, field.Invalid(token.Child("expirationSeconds"), n, "may not specify a duration less than 10 minutes"))
			} else if n > maxTokenSeconds {
				errs = append(errs, field.Invalid(token.Child("expirationSeconds"), n, "may not specify a duration larger than 2^32 seconds"))
			}
			errs = append(errs, validateFilePath(t.Path, token.Child("path"))...)
		}
	}
	return errs
}

// validateProjectedPaths refuses two items of a projected volume at one path. Keys without items are not compared: of these
// the last source wins. As in Kubernetes, the errors name the volume and, for objects, the object.
func validateProjectedPaths(p *corev1.ProjectedVolumeSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	add := func(path, shown string) {
		if path != "" && seen[path] {
			errs = append(errs, field.Invalid(at, shown, "conflicting duplicate paths"))
		}
		seen[path] = true
	}
	for i := range p.Sources {
		s := &p.Sources[i]
		if s.Secret != nil {
			for _, item := range s.Secret.Items {
				add(item.Path, s.Secret.Name)
			}
		}
		if s.ConfigMap != nil {
			for _, item := range s.ConfigMap.Items {
				add(item.Path, s.ConfigMap.Name)
			}
		}
		if s.DownwardAPI != nil {
			for _, item := range s.DownwardAPI.Items {
				add(item.Path, item.Path)
			}
		}
		if s.ClusterTrustBundle != nil {
			add(s.ClusterTrustBundle.Path, s.ClusterTrustBundle.Path)
		}
	}
	return errs
}

func validateMounts(c *corev1.Container, volumes map[string]corev1.VolumeSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	paths := map[string]bool{}
	for i, m := range c.VolumeMounts {
		here := at.Index(i)
		if m.Name == "" {
			errs = append(errs, field.Required(here.Child("name"), ""))
		}
		if _, ok := volumes[m.Name]; !ok {
			errs = append(errs, field.NotFound(here.Child("name"), m.Name))
		}
		if m.MountPath == "" {
			errs = append(errs, field.Required(here.Child("mountPath"), ""))
		}
		if paths[m.MountPath] {
			errs = append(errs, field.Invalid(here.Child("mountPath"), m.MountPath, "must be unique"))
		}
		paths[m.MountPath] = true
		if m.SubPath != "" {
			errs = append(errs, validateDescending(m.SubPath, at.Child("subPath"))...)
		}
		if m.SubPathExpr != "" {
			if m.SubPath != "" {
				errs = append(errs, field.Invalid(here.Child("subPathExpr"), m.SubPathExpr, "subPathExpr and subPath are mutually exclusive"))
			}
			errs = append(errs, validateDescending(m.SubPathExpr, at.Child("subPathExpr"))...)
		}
		errs = append(errs, validateMountKind(&m, c.SecurityContext != nil && isTrue(c.SecurityContext.Privileged), at)...)
	}
	return errs
}

func validateDevices(c *corev1.Container, volumes map[string]corev1.VolumeSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	paths := map[string]bool{}
	for _, m := range c.VolumeMounts {
		paths[m.MountPath] = true
	}
	for i, d := range c.VolumeDevices {
		here := at.Index(i)
		v, ok := volumes[d.Name]
		switch {
		case d.Name == "":
			errs = append(errs, field.Required(here.Child("name"), ""))
		case !ok:
			errs = append(errs, field.NotFound(here.Child("name"), d.Name))
		case v.PersistentVolumeClaim == nil && v.Ephemeral == nil:
			errs = append(errs, field.Invalid(here.Child("name"), d.Name, "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode"))
		}
		switch {
		case d.DevicePath == "":
			errs = append(errs, field.Required(here.Child("devicePath"), ""))
		case paths[d.DevicePath]:
			errs = append(errs, field.Invalid(here.Child("devicePath"), d.DevicePath, "must not already exist as a path in volumeMounts"))
		default:
			if len(noBacksteps(d.DevicePath, here.Child("devicePath"))) > 0 {
				errs = append(errs, field.Invalid(here.Child("devicePath"), d.DevicePath, "can not contain backsteps ('..')"))
			}
		}
		paths[d.DevicePath] = true
	}
	return errs
}
