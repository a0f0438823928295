package podspec

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
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Limits for the lifetime of a projected service account token, in seconds.
const (
	MinTokenSeconds = 10 * 60
	MaxTokenSeconds = 1 << 32
)

// Fields of the pod to which a fieldRef in environment variables or in files can refer.
var (
	envFields = []string{"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName",
		"spec.serviceAccountName",
		"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"}
	fileFields = []string{"metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace",
		"metadata.uid"}
)

// ValidateVolumes validates the volumes of a pod. It returns the valid volumes by name, for the
// validation of mounts, and the errors.
func ValidateVolumes(volumes []corev1.Volume, fldPath *field.Path) (map[string]corev1.VolumeSource, field.ErrorList) {
	var errs field.ErrorList
	byName := make(map[string]corev1.VolumeSource, len(volumes))
	for i := range volumes {
		v, here, before := &volumes[i], fldPath.Index(i), len(errs)
		switch _, twice := byName[v.Name]; {
		case v.Name == "":
			errs = append(errs, field.Required(here.Child("name"), ""))
		case twice:
			errs = append(errs, field.Duplicate(here.Child("name"), v.Name))
		default:
			errs = append(errs, fieldrules.InvalidErrors(here.Child("name"), v.Name,
				utilvalidation.IsDNS1123Label(v.Name))...)
		}
		errs = append(errs, validateVolumeSource(&v.VolumeSource, v.Name, here)...)
		if len(errs) == before { // a mount of an invalid volume is an error too
			byName[v.Name] = v.VolumeSource
		}
	}
	return byName, errs
}

// volumeSources returns the sources of a volume with their names in errors, in the order in which
// Kubernetes checks them.
func volumeSources(v *corev1.VolumeSource) []NamedSource {
	return []NamedSource{
		{"emptyDir", v.EmptyDir != nil}, {"hostPath", v.HostPath != nil}, {"gitRepo", v.GitRepo != nil},
		{"gcePersistentDisk", v.GCEPersistentDisk != nil}, {"awsElasticBlockStore", v.AWSElasticBlockStore != nil},
		{"secret", v.Secret != nil}, {"nfs", v.NFS != nil}, {"iscsi", v.ISCSI != nil},
		{"glusterfs", v.Glusterfs != nil},
		{"flocker", v.Flocker != nil}, {"persistentVolumeClaim", v.PersistentVolumeClaim != nil}, {"rbd", v.RBD != nil},
		{"cinder", v.Cinder != nil}, {"cephFS", v.CephFS != nil}, {"quobyte", v.Quobyte != nil},
		{"downwarAPI", v.DownwardAPI != nil},
		{"fc", v.FC != nil}, {"flexVolume", v.FlexVolume != nil}, {"configMap", v.ConfigMap != nil},
		{"azureFile", v.AzureFile != nil},
		{"vsphereVolume", v.VsphereVolume != nil}, {"photonPersistentDisk", v.PhotonPersistentDisk != nil},
		{"portworxVolume", v.PortworxVolume != nil}, {"azureDisk", v.AzureDisk != nil},
		{"storageos", v.StorageOS != nil},
		{"projected", v.Projected != nil}, {"scaleIO", v.ScaleIO != nil}, {"csi", v.CSI != nil},
		{"ephemeral", v.Ephemeral != nil},
		{"image", v.Image != nil},
	}
}

// NamedSource is a member of a union, such as a volume source, with the name of its field.
type NamedSource struct {
	Name string
	Set  bool
}

// ValidateOneMember returns the name of the first member of a union that is set, which the caller
// then validates. It is "" if no member is set. errs contains an error for each other member that
// is set. description is the name of the union in these errors.
func ValidateOneMember(members []NamedSource, description string, fldPath *field.Path) (
	first string, errs field.ErrorList,
) {
	for _, m := range members {
		switch {
		case !m.Set:
		case first == "":
			first = m.Name
		default:
			errs = append(errs, field.Forbidden(fldPath.Child(m.Name),
				"may not specify more than 1 "+description+" type"))
		}
	}
	return first, errs
}

func validateVolumeSource(v *corev1.VolumeSource, name string, fldPath *field.Path) field.ErrorList {
	first, errs := ValidateOneMember(volumeSources(v), "volume", fldPath)
	switch first {
	case "":
		return field.ErrorList{field.Required(fldPath, "must specify a volume type")}
	case "emptyDir":
		if s := v.EmptyDir.SizeLimit; s != nil && s.Sign() < 0 {
			errs = append(errs, field.Forbidden(fldPath.Child("emptyDir", "sizeLimit"),
				"SizeLimit field must be a valid resource quantity"))
		}
	case "hostPath":
		errs = append(errs, ValidateHostPath(v.HostPath, fldPath.Child("hostPath"))...)
	case "secret":
		errs = append(errs, validateNamedFiles(v.Secret.SecretName, "secretName", v.Secret.DefaultMode, v.Secret.Items,
			fldPath.Child("secret"))...)
	case "configMap":
		errs = append(errs, validateNamedFiles(v.ConfigMap.Name, "name", v.ConfigMap.DefaultMode, v.ConfigMap.Items,
			fldPath.Child("configMap"))...)
	case "downwarAPI":
		errs = append(errs, validateMode(v.DownwardAPI.DefaultMode, fldPath.Child("downwardAPI", "defaultMode"))...)
		errs = append(errs, validateDownward(v.DownwardAPI.Items, fldPath.Child("downwardAPI"))...)
	case "persistentVolumeClaim":
		if v.PersistentVolumeClaim.ClaimName == "" {
			errs = append(errs, field.Required(fldPath.Child("persistentVolumeClaim", "claimName"), ""))
		}
	case "ephemeral":
		errs = append(errs, validateOwnClaim(v.Ephemeral, fldPath.Child("ephemeral", "volumeClaimTemplate"))...)
	case "csi":
		errs = append(errs, fieldrules.ValidateDriverName(v.CSI.Driver, fldPath.Child("csi", "driver"))...)
		if r := v.CSI.NodePublishSecretRef; r != nil && r.Name == "" {
			errs = append(errs, field.Required(fldPath.Child("csi", "nodePublishSecretRef", "name"), ""))
		}
	case "nfs":
		errs = append(errs, ValidateNFS(v.NFS, fldPath.Child("nfs"))...)
	case "iscsi":
		errs = append(errs, validateInlineISCSI(v.ISCSI, fldPath.Child("iscsi"))...)
	case "projected":
		errs = append(errs, validateProjected(v.Projected, fldPath.Child("projected"))...)
	}
	if d := v.ISCSI; d != nil && d.InitiatorName != nil && len(name)+1+len(d.TargetPortal) > maxISCSIInterface {
		errs = append(errs, field.Invalid(fldPath.Child("name"), name, longISCSIName))
	}
	return errs
}

func validateOwnClaim(e *corev1.EphemeralVolumeSource, fldPath *field.Path) field.ErrorList {
	if e.VolumeClaimTemplate == nil {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	errs := validateOwnClaimMeta(&e.VolumeClaimTemplate.ObjectMeta, fldPath.Child("metadata"))
	return append(errs, ValidateClaimSpec(&e.VolumeClaimTemplate.Spec, fldPath.Child("spec"))...)
}

// validateOwnClaimMeta validates the metadata of the claim template in an ephemeral volume. Only
// labels and annotations may be set.
func validateOwnClaimMeta(meta *metav1.ObjectMeta, fldPath *field.Path) field.ErrorList {
	errs := ValidateTemplateMeta(meta, fldPath)
	const no = "cannot be set"
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"name", meta.Name != ""}, {"generateName", meta.GenerateName != ""}, {"namespace", meta.Namespace != ""},
		{"selfLink", meta.SelfLink != ""},
		{"uid", meta.UID != ""}, {"resourceVersion", meta.ResourceVersion != ""}, {"generation", meta.Generation != 0},
		{"creationTimestamp", !meta.CreationTimestamp.IsZero()}, {"deletionTimestamp", meta.DeletionTimestamp != nil},
		{"deletionGracePeriodSeconds", meta.DeletionGracePeriodSeconds != nil},
		{"ownerReferences", meta.OwnerReferences != nil},
		{"finalizers", meta.Finalizers != nil}, {"managedFields", meta.ManagedFields != nil},
	} {
		if f.set {
			errs = append(errs, field.Forbidden(fldPath.Child(f.name), no))
		}
	}
	return errs
}

// ValidateOwnClaims validates the names of the claims that are created for a pod's ephemeral
// volumes. The pod must already have its name.
func ValidateOwnClaims(p *corev1.Pod, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	made := map[string]bool{}
	for i := range p.Spec.Volumes {
		if p.Spec.Volumes[i].Ephemeral != nil {
			made[p.Name+"-"+p.Spec.Volumes[i].Name] = true
		}
	}
	for i := range p.Spec.Volumes {
		v := &p.Spec.Volumes[i]
		if c := v.PersistentVolumeClaim; c != nil && p.Name != "" && made[c.ClaimName] {
			errs = append(errs, field.Invalid(fldPath.Index(i).Child("persistentVolumeClaim", "claimName"), c.ClaimName,
				"must not reference a PVC that gets created for an ephemeral volume"))
		}
		if v.Ephemeral == nil || p.Name == "" || v.Name == "" {
			continue
		}
		claim := p.Name + "-" + v.Name
		for _, wrong := range validation.NameIsDNSSubdomain(claim, false) {
			errs = append(errs, field.Invalid(fldPath.Index(i).Child("name"), v.Name,
				fmt.Sprintf("PVC name %q: %v", claim, wrong)))
		}
	}
	return errs
}

// ValidateHostPath returns the errors in a hostPath volume.
func ValidateHostPath(h *corev1.HostPathVolumeSource, fldPath *field.Path) field.ErrorList {
	if h.Path == "" {
		return field.ErrorList{field.Required(fldPath.Child("path"), "")}
	}
	errs := fieldrules.ValidateNoBacksteps(h.Path, fldPath.Child("path"))
	return append(errs, fieldrules.ValidateSupported(ptr.Deref(h.Type, ""), fldPath.Child("type"), corev1.HostPathUnset,
		corev1.HostPathBlockDev, corev1.HostPathCharDev,
		corev1.HostPathDirectory, corev1.HostPathDirectoryOrCreate, corev1.HostPathFile, corev1.HostPathFileOrCreate,
		corev1.HostPathSocket)...)
}

// ValidateNFS returns the errors in an nfs volume.
func ValidateNFS(n *corev1.NFSVolumeSource, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if n.Server == "" {
		errs = append(errs, field.Required(fldPath.Child("server"), ""))
	}
	if n.Path == "" {
		errs = append(errs, field.Required(fldPath.Child("path"), ""))
	}
	if !path.IsAbs(n.Path) {
		errs = append(errs, field.Invalid(fldPath.Child("path"), n.Path, "must be an absolute path"))
	}
	return errs
}

func validateMode(m *int32, fldPath *field.Path) field.ErrorList {
	if m != nil && (*m < 0 || *m > 0o777) {
		return field.ErrorList{field.Invalid(fldPath, *m,
			"must be a number between 0 and 0777 (octal), both inclusive")}
	}
	return nil
}

func validateNamedFiles(
	name, nameField string, mode *int32, items []corev1.KeyToPath, fldPath *field.Path,
) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(fldPath.Child(nameField), ""))
	}
	errs = append(errs, validateMode(mode, fldPath.Child("defaultMode"))...)
	return append(errs, validateItems(items, fldPath.Child("items"))...)
}

func validateItems(items []corev1.KeyToPath, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, item := range items {
		here := fldPath.Index(i)
		if item.Key == "" {
			errs = append(errs, field.Required(here.Child("key"), ""))
		}
		errs = append(errs, validateFilePath(item.Path, here.Child("path"))...)
		errs = append(errs, validateMode(item.Mode, here.Child("mode"))...)
	}
	return errs
}

// validateFilePath validates the path of a file in a volume. Names that start with ".." are
// reserved for the symbolic links with which a volume is updated atomically.
func validateFilePath(filePath string, fldPath *field.Path) field.ErrorList {
	if filePath == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	errs := fieldrules.ValidateDescending(filePath, fldPath)
	if strings.HasPrefix(filePath, "..") && !strings.HasPrefix(filePath, "../") {
		errs = append(errs, field.Invalid(fldPath, filePath, "must not start with '..'"))
	}
	return errs
}

// validateDownward validates the files of a downward API volume. As in Kubernetes, the paths of the
// errors are those of the volume and not of the item.
func validateDownward(items []corev1.DownwardAPIVolumeFile, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, item := range items {
		errs = append(errs, validateFilePath(item.Path, fldPath.Child("path"))...)
		errs = append(errs, validateMode(item.Mode, fldPath.Child("mode"))...)
		switch {
		case item.FieldRef != nil:
			errs = append(errs, validateFieldRef(item.FieldRef, fileFields, fldPath.Child("fieldRef"))...)
			if item.ResourceFieldRef != nil {
				errs = append(errs, field.Invalid(fldPath, "resource",
					"fieldRef and resourceFieldRef can not be specified simultaneously"))
			}
		case item.ResourceFieldRef != nil:
			errs = append(errs, validateResourceRef(item.ResourceFieldRef, true, fldPath.Child("resourceFieldRef"))...)
		default:
			errs = append(errs, field.Required(fldPath, "one of fieldRef and resourceFieldRef is required"))
		}
	}
	return errs
}

func validateFieldRef(r *corev1.ObjectFieldSelector, allowed []string, fldPath *field.Path) field.ErrorList {
	unconverted := func(why string) field.ErrorList {
		return field.ErrorList{field.Invalid(fldPath.Child("fieldPath"), r.FieldPath,
			"error converting fieldPath: "+why)}
	}
	fieldName, subscripted, key := r.FieldPath, strings.HasSuffix(r.FieldPath, "']"), ""
	if subscripted {
		fieldName, key, subscripted = strings.Cut(strings.TrimSuffix(r.FieldPath, "']"), "['")
	}
	switch {
	case r.FieldPath == "":
		return field.ErrorList{field.Required(fldPath.Child("fieldPath"), "")}
	case r.APIVersion != "v1":
		return unconverted("unsupported pod version: " + r.APIVersion)
	case subscripted && fieldName == "metadata.annotations":
		return fieldrules.InvalidErrors(fldPath, strings.ToLower(key),
			utilvalidation.IsQualifiedName(strings.ToLower(key)))
	case subscripted && fieldName == "metadata.labels":
		return fieldrules.InvalidErrors(fldPath, key, utilvalidation.IsQualifiedName(key))
	case subscripted:
		return unconverted("field label does not support subscript: " + r.FieldPath)
	case fieldName == "spec.host": // the old name of spec.nodeName
		fieldName = "spec.nodeName"
	case !slices.Contains(knownFields, fieldName):
		return unconverted("field label not supported: " + fieldName)
	}
	return fieldrules.ValidateOneOf(fieldName, fldPath.Child("fieldPath"), allowed...)
}

// knownFields are all fields of a pod to which a fieldRef can refer. Environment variables and
// volumes each allow only some of them.
var knownFields = strings.Fields("metadata.annotations metadata.labels metadata.name metadata.namespace " +
	"metadata.uid spec.nodeName " +
	"spec.restartPolicy spec.serviceAccountName spec.schedulerName status.phase status.hostIP status.hostIPs " +
	"status.podIP status.podIPs")

func validateProjected(p *corev1.ProjectedVolumeSource, fldPath *field.Path) field.ErrorList {
	errs := validateMode(p.DefaultMode, fldPath.Child("defaultMode"))
	errs = append(errs, validateProjectedPaths(p, fldPath)...)
	for i := range p.Sources {
		s, here := &p.Sources[i], fldPath.Child("sources").Index(i)
		if fieldrules.CountSet(*s) > 1 {
			errs = append(errs, field.Forbidden(here, "may not specify more than 1 volume type per source"))
		}
		if c := s.Secret; c != nil {
			errs = append(errs, validateNamedFiles(c.Name, "name", nil, c.Items, here.Child("secret"))...)
		}
		if c := s.ConfigMap; c != nil {
			errs = append(errs, validateNamedFiles(c.Name, "name", nil, c.Items, here.Child("configMap"))...)
		}
		if s.DownwardAPI != nil {
			errs = append(errs, validateDownward(s.DownwardAPI.Items, here.Child("downwardAPI"))...)
		}
		if t := s.ServiceAccountToken; t != nil {
			seconds := here.Child("serviceAccountToken", "expirationSeconds")
			if n := ptr.Deref(t.ExpirationSeconds, 0); n < MinTokenSeconds {
				errs = append(errs, field.Invalid(seconds, n, "may not specify a duration less than 10 minutes"))
			} else if n > MaxTokenSeconds {
				errs = append(errs, field.Invalid(seconds, n, "may not specify a duration larger than 2^32 seconds"))
			}
			// as in Kubernetes, the path is that of the volume
			errs = append(errs, validateFilePath(t.Path, fldPath.Child("path"))...)
		}
	}
	return errs
}

// validateProjectedPaths returns an error for each path that several items of a projected volume
// have. Sources without an items list are not compared: if they have a key in common, the last
// source determines the file. As in Kubernetes, an error contains the volume's name and, for a
// ConfigMap or Secret source, the name of that object.
func validateProjectedPaths(projected *corev1.ProjectedVolumeSource, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	add := func(mountPath, shown string) {
		if mountPath != "" && seen[mountPath] {
			errs = append(errs, field.Invalid(fldPath, shown, "conflicting duplicate paths"))
		}
		seen[mountPath] = true
	}
	for i := range projected.Sources {
		s := &projected.Sources[i]
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

func validateMounts(c *corev1.Container, volumes map[string]corev1.VolumeSource, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	paths, names, devices := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, d := range c.VolumeDevices {
		names[d.Name], devices[d.DevicePath] = true, true
	}
	for i, m := range c.VolumeMounts {
		here := fldPath.Index(i)
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
		if names[m.Name] {
			errs = append(errs, field.Invalid(here.Child("name"), m.Name, "must not already exist in volumeDevices"))
		}
		if devices[m.MountPath] {
			errs = append(errs, field.Invalid(here.Child("mountPath"), m.MountPath,
				"must not already exist as a path in volumeDevices"))
		}
		if m.SubPath != "" {
			errs = append(errs, fieldrules.ValidateDescending(m.SubPath, fldPath.Child("subPath"))...)
		}
		if m.SubPathExpr != "" {
			if m.SubPath != "" {
				errs = append(errs, field.Invalid(here.Child("subPathExpr"), m.SubPathExpr,
					"subPathExpr and subPath are mutually exclusive"))
			}
			errs = append(errs, fieldrules.ValidateDescending(m.SubPathExpr, fldPath.Child("subPathExpr"))...)
		}
		errs = append(errs, validateMountKind(&m,
			c.SecurityContext != nil && ptr.Deref(c.SecurityContext.Privileged, false), fldPath)...)
	}
	return errs
}

func validateDevices(c *corev1.Container, volumes map[string]corev1.VolumeSource, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	mounted, mounts := map[string]bool{}, map[string]bool{}
	for _, m := range c.VolumeMounts {
		mounted[m.Name], mounts[m.MountPath] = true, true
	}
	names, paths := map[string]bool{}, map[string]bool{}
	for i, d := range c.VolumeDevices {
		name, devicePath := fldPath.Index(i).Child("name"), fldPath.Index(i).Child("devicePath")
		v, ok := volumes[d.Name]
		if d.Name == "" {
			errs = append(errs, field.Required(name, ""))
		}
		if names[d.Name] {
			errs = append(errs, field.Invalid(name, d.Name, "must be unique"))
		}
		if !ok {
			errs = append(errs, field.NotFound(name, d.Name))
		} else if v.PersistentVolumeClaim == nil && v.Ephemeral == nil {
			errs = append(errs, field.Invalid(name, d.Name,
				"can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode"))
		}
		if d.DevicePath == "" {
			errs = append(errs, field.Required(devicePath, ""))
		}
		if paths[d.DevicePath] {
			errs = append(errs, field.Invalid(devicePath, d.DevicePath, "must be unique"))
		}
		if len(fieldrules.ValidateNoBacksteps(d.DevicePath, devicePath)) > 0 {
			errs = append(errs, field.Invalid(devicePath, d.DevicePath, "can not contain backsteps ('..')"))
		} else {
			paths[d.DevicePath] = true
		}
		if mounted[d.Name] {
			errs = append(errs, field.Invalid(name, d.Name, "must not already exist in volumeMounts"))
		}
		if mounts[d.DevicePath] {
			errs = append(errs, field.Invalid(devicePath, d.DevicePath,
				"must not already exist as a path in volumeMounts"))
		}
		names[d.Name] = d.Name != ""
	}
	return errs
}
