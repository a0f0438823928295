// Package podref lists the objects that a pod references. It is the only code that knows which
// fields of a pod refer to other objects. Authorization grants a node access to the objects that
// its pods reference. The node gateway sends these objects to the node. Admission rejects
// references in mirror pods.
package podref

import (
	"iter"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// Ref is one reference from a pod to another object.
type Ref struct {
	// Resource is the plural name of the referenced resource ("secrets"). Namespace is empty for a
	// cluster-scoped resource.
	Resource, Namespace string
	// Name is the name of the object. It is empty if the field requests something without a name (a
	// signer's certificate).
	Name string

	path    string // the field's path, with [] for each list
	element string // name of the list element that the first [] stands for
}

// Field returns the path of the field with the reference, with the names of list elements:
// spec.volumes["data"].secret.secretName.
func (r Ref) Field() string {
	if r.element == "" {
		return r.path
	}
	return strings.Replace(r.path, "[]", "["+strconv.Quote(r.element)+"]", 1)
}

// Path returns the path of the field without the names of list elements:
// spec.volumes[].secret.secretName.
func (r Ref) Path() string { return r.path }

// IsMirror reports whether the pod is a mirror pod of a static pod. A node creates it, so a node
// must not get access to objects because of it.
func IsMirror(p *corev1.Pod) bool {
	_, mirror := p.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

// References returns an iterator over the references of a pod, in the order of its fields. An
// object that is referenced several times is repeated.
func References(p *corev1.Pod) iter.Seq[Ref] {
	return func(yield func(Ref) bool) {
		w := walker{namespace: p.Namespace, yield: yield}
		w.visitSpec(p)
	}
}

// walker calls yield for each reference of a pod until yield returns false.
type walker struct {
	namespace string
	yield     func(Ref) bool
	done      bool
}

func (w *walker) addRef(resource, name, path, element string) {
	if !w.done {
		w.done = !w.yield(Ref{Resource: resource, Namespace: w.namespace, Name: name, path: path, element: element})
	}
}

// addNamed is like addRef, but does nothing if the name is empty.
func (w *walker) addNamed(resource, name, path, element string) {
	if name != "" {
		w.addRef(resource, name, path, element)
	}
}

// addClusterScoped is like addRef, for a reference to a cluster-scoped resource.
func (w *walker) addClusterScoped(resource, name, path, element string) {
	if !w.done {
		w.done = !w.yield(Ref{Resource: resource, Name: name, path: path, element: element})
	}
}

func (w *walker) visitSpec(p *corev1.Pod) {
	s := &p.Spec
	w.addNamed("serviceaccounts", s.ServiceAccountName, "spec.serviceAccountName", "")
	w.addNamed("serviceaccounts", s.DeprecatedServiceAccount, "spec.serviceAccount", "")
	for i := range s.ImagePullSecrets {
		w.addNamed("secrets", s.ImagePullSecrets[i].Name, "spec.imagePullSecrets[].name", s.ImagePullSecrets[i].Name)
	}
	for i := range s.InitContainers {
		c := &s.InitContainers[i]
		w.visitEnvironment(c.Env, c.EnvFrom, &initFields, c.Name)
	}
	for i := range s.Containers {
		c := &s.Containers[i]
		w.visitEnvironment(c.Env, c.EnvFrom, &mainFields, c.Name)
	}
	for i := range s.EphemeralContainers {
		c := &s.EphemeralContainers[i]
		w.visitEnvironment(c.Env, c.EnvFrom, &ephemeralFields, c.Name)
	}
	for i := range s.Volumes {
		w.visitVolume(p, &s.Volumes[i])
	}
	for i := range s.ResourceClaims {
		c := &s.ResourceClaims[i]
		if c.ResourceClaimName != nil {
			w.addNamed("resourceclaims", *c.ResourceClaimName, "spec.resourceClaims[].resourceClaimName", c.Name)
		}
		if c.ResourceClaimTemplateName != nil {
			w.addNamed("resourceclaimtemplates", *c.ResourceClaimTemplateName,
				"spec.resourceClaims[].resourceClaimTemplateName", c.Name)
		}
	}
	// These ResourceClaims were created from templates. Nodes do not write this part of the status.
	for i := range p.Status.ResourceClaimStatuses {
		if c := &p.Status.ResourceClaimStatuses[i]; c.ResourceClaimName != nil {
			w.addNamed("resourceclaims", *c.ResourceClaimName, "status.resourceClaimStatuses[].resourceClaimName",
				c.Name)
		}
	}
	if g := s.SchedulingGroup; g != nil && g.PodGroupName != nil {
		w.addNamed("podgroups", *g.PodGroupName, "spec.schedulingGroup.podGroupName", "")
	}
}

// envFields are the paths of references in the environment of containers, for one list of
// containers.
type envFields struct{ configMapKey, secretKey, configMap, secret string }

func envFieldsOf(list string) envFields {
	at := "spec." + list + "[]."
	return envFields{
		configMapKey: at + "env[].valueFrom.configMapKeyRef.name", secretKey: at + "env[].valueFrom.secretKeyRef.name",
		configMap: at + "envFrom[].configMapRef.name", secret: at + "envFrom[].secretRef.name",
	}
}

var (
	initFields      = envFieldsOf("initContainers")
	mainFields      = envFieldsOf("containers")
	ephemeralFields = envFieldsOf("ephemeralContainers")
)

func (w *walker) visitEnvironment(
	env []corev1.EnvVar, envFrom []corev1.EnvFromSource, paths *envFields, element string,
) {
	for i := range env {
		v := env[i].ValueFrom
		if v == nil {
			continue
		}
		if v.ConfigMapKeyRef != nil {
			w.addNamed("configmaps", v.ConfigMapKeyRef.Name, paths.configMapKey, element)
		}
		if v.SecretKeyRef != nil {
			w.addNamed("secrets", v.SecretKeyRef.Name, paths.secretKey, element)
		}
	}
	for i := range envFrom {
		if r := envFrom[i].ConfigMapRef; r != nil {
			w.addNamed("configmaps", r.Name, paths.configMap, element)
		}
		if r := envFrom[i].SecretRef; r != nil {
			w.addNamed("secrets", r.Name, paths.secret, element)
		}
	}
}

// visitVolume yields the references of every source of a volume. Validation ensures that there is
// only one source.
func (w *walker) visitVolume(p *corev1.Pod, v *corev1.Volume) {
	const at = "spec.volumes[]."
	if v.Secret != nil {
		w.addNamed("secrets", v.Secret.SecretName, at+"secret.secretName", v.Name)
	}
	if v.ConfigMap != nil {
		w.addNamed("configmaps", v.ConfigMap.Name, at+"configMap.name", v.Name)
	}
	if v.PersistentVolumeClaim != nil {
		w.addNamed("persistentvolumeclaims", v.PersistentVolumeClaim.ClaimName,
			at+"persistentVolumeClaim.claimName", v.Name)
	}
	if v.Ephemeral != nil {
		w.addRef("persistentvolumeclaims", p.Name+"-"+v.Name, at+"ephemeral", v.Name)
	}
	if v.CSI != nil {
		w.addClusterScoped("csidrivers", v.CSI.Driver, at+"csi", v.Name)
		w.addSecret(v.CSI.NodePublishSecretRef, at+"csi.nodePublishSecretRef.name", v.Name)
	}
	if v.Projected != nil {
		for i := range v.Projected.Sources {
			w.visitProjection(p, &v.Projected.Sources[i], v.Name)
		}
	}
	w.visitInTreeSource(v)
}

func (w *walker) addSecret(r *corev1.LocalObjectReference, path, element string) {
	if r != nil {
		w.addNamed("secrets", r.Name, path, element)
	}
}

func (w *walker) visitProjection(p *corev1.Pod, s *corev1.VolumeProjection, element string) {
	const at = "spec.volumes[].projected.sources[]."
	if s.Secret != nil {
		w.addNamed("secrets", s.Secret.Name, at+"secret.name", element)
	}
	if s.ConfigMap != nil {
		w.addNamed("configmaps", s.ConfigMap.Name, at+"configMap.name", element)
	}
	if s.ServiceAccountToken != nil {
		w.addRef("serviceaccounts", p.Spec.ServiceAccountName, at+"serviceAccountToken", element)
	}
	if b := s.ClusterTrustBundle; b != nil {
		name := ptr.Deref(b.Name, "")
		w.addClusterScoped("clustertrustbundles", name, at+"clusterTrustBundle", element)
	}
	if s.PodCertificate != nil {
		w.addRef("podcertificaterequests", "", at+"podCertificate", element)
	}
}

// visitInTreeSource yields the references to Secrets of in-tree volume types.
func (w *walker) visitInTreeSource(v *corev1.Volume) {
	const at = "spec.volumes[]."
	if v.AzureFile != nil {
		w.addNamed("secrets", v.AzureFile.SecretName, at+"azureFile.secretName", v.Name)
	}
	if v.CephFS != nil {
		w.addSecret(v.CephFS.SecretRef, at+"cephfs.secretRef.name", v.Name)
	}
	if v.Cinder != nil {
		w.addSecret(v.Cinder.SecretRef, at+"cinder.secretRef.name", v.Name)
	}
	if v.FlexVolume != nil {
		w.addSecret(v.FlexVolume.SecretRef, at+"flexVolume.secretRef.name", v.Name)
	}
	if v.Glusterfs != nil {
		w.addNamed("endpoints", v.Glusterfs.EndpointsName, at+"glusterfs.endpoints", v.Name)
	}
	if v.ISCSI != nil {
		w.addSecret(v.ISCSI.SecretRef, at+"iscsi.secretRef.name", v.Name)
	}
	if v.RBD != nil {
		w.addSecret(v.RBD.SecretRef, at+"rbd.secretRef.name", v.Name)
	}
	if v.ScaleIO != nil {
		w.addSecret(v.ScaleIO.SecretRef, at+"scaleIO.secretRef.name", v.Name)
	}
	if v.StorageOS != nil {
		w.addSecret(v.StorageOS.SecretRef, at+"storageos.secretRef.name", v.Name)
	}
}
