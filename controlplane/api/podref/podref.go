// Package podref lists the objects that a pod references. It is the only code that knows which
// fields of a pod name other objects. Authorization grants a node access to the objects that its
// pods reference. The node gateway sends these objects to the node. Admission rejects references in
// mirror pods.
package podref

import (
	"iter"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Ref is one reference from a pod to another object.
type Ref struct {
	// Resource is the plural of the referenced resource ("secrets"). Namespace is empty for a
	// cluster-scoped resource.
	Resource, Namespace string
	// Name is empty if the field requests something without a name (a signer's certificate).
	Name string

	at string // the field's path, with [] for each list
	of string // name of the list element for the first []
}

// Field returns the path of the reference: spec.volumes["data"].secret.secretName.
func (r Ref) Field() string {
	if r.of == "" {
		return r.at
	}
	return strings.Replace(r.at, "[]", "["+strconv.Quote(r.of)+"]", 1)
}

// Path returns Field without the names of list elements: spec.volumes[].secret.secretName.
func (r Ref) Path() string { return r.at }

// IsMirror reports whether the pod is a mirror pod of a static pod. A node creates it, so a node
// must not get access to objects because of it.
func IsMirror(p *corev1.Pod) bool {
	_, mirror := p.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

// Of returns an iterator over the references of a pod, in the order of its fields. An object that
// is referenced several times is repeated.
func Of(p *corev1.Pod) iter.Seq[Ref] {
	return func(yield func(Ref) bool) {
		w := walk{namespace: p.Namespace, yield: yield}
		w.spec(p)
	}
}

// walk yields references until yield returns false.
type walk struct {
	namespace string
	yield     func(Ref) bool
	done      bool
}

func (w *walk) add(resource, name, at, of string) {
	if !w.done {
		w.done = !w.yield(Ref{Resource: resource, Namespace: w.namespace, Name: name, at: at, of: of})
	}
}

// named is add for a field that may be empty, and then references nothing.
func (w *walk) named(resource, name, at, of string) {
	if name != "" {
		w.add(resource, name, at, of)
	}
}

// wide is add for a cluster-scoped resource.
func (w *walk) wide(resource, name, at, of string) {
	if !w.done {
		w.done = !w.yield(Ref{Resource: resource, Name: name, at: at, of: of})
	}
}

func (w *walk) spec(p *corev1.Pod) {
	s := &p.Spec
	w.named("serviceaccounts", s.ServiceAccountName, "spec.serviceAccountName", "")
	w.named("serviceaccounts", s.DeprecatedServiceAccount, "spec.serviceAccount", "")
	for i := range s.ImagePullSecrets {
		w.named("secrets", s.ImagePullSecrets[i].Name, "spec.imagePullSecrets[].name", s.ImagePullSecrets[i].Name)
	}
	for i := range s.InitContainers {
		c := &s.InitContainers[i]
		w.environment(c.Env, c.EnvFrom, &initFields, c.Name)
	}
	for i := range s.Containers {
		c := &s.Containers[i]
		w.environment(c.Env, c.EnvFrom, &mainFields, c.Name)
	}
	for i := range s.EphemeralContainers {
		c := &s.EphemeralContainers[i]
		w.environment(c.Env, c.EnvFrom, &ephemeralFields, c.Name)
	}
	for i := range s.Volumes {
		w.volume(p, &s.Volumes[i])
	}
	for i := range s.ResourceClaims {
		c := &s.ResourceClaims[i]
		if c.ResourceClaimName != nil {
			w.named("resourceclaims", *c.ResourceClaimName, "spec.resourceClaims[].resourceClaimName", c.Name)
		}
		if c.ResourceClaimTemplateName != nil {
			w.named("resourceclaimtemplates", *c.ResourceClaimTemplateName,
				"spec.resourceClaims[].resourceClaimTemplateName", c.Name)
		}
	}
	// ResourceClaims created from templates. Nodes do not write this part of the status.
	for i := range p.Status.ResourceClaimStatuses {
		if c := &p.Status.ResourceClaimStatuses[i]; c.ResourceClaimName != nil {
			w.named("resourceclaims", *c.ResourceClaimName, "status.resourceClaimStatuses[].resourceClaimName", c.Name)
		}
	}
	if g := s.SchedulingGroup; g != nil && g.PodGroupName != nil {
		w.named("podgroups", *g.PodGroupName, "spec.schedulingGroup.podGroupName", "")
	}
}

// envFields are the paths of the environment's references in one list of containers.
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

func (w *walk) environment(env []corev1.EnvVar, from []corev1.EnvFromSource, at *envFields, of string) {
	for i := range env {
		v := env[i].ValueFrom
		if v == nil {
			continue
		}
		if v.ConfigMapKeyRef != nil {
			w.named("configmaps", v.ConfigMapKeyRef.Name, at.configMapKey, of)
		}
		if v.SecretKeyRef != nil {
			w.named("secrets", v.SecretKeyRef.Name, at.secretKey, of)
		}
	}
	for i := range from {
		if r := from[i].ConfigMapRef; r != nil {
			w.named("configmaps", r.Name, at.configMap, of)
		}
		if r := from[i].SecretRef; r != nil {
			w.named("secrets", r.Name, at.secret, of)
		}
	}
}

// volume yields the references of every source of a volume. Validation ensures that there is only
// one source.
func (w *walk) volume(p *corev1.Pod, v *corev1.Volume) {
	const at = "spec.volumes[]."
	if v.Secret != nil {
		w.named("secrets", v.Secret.SecretName, at+"secret.secretName", v.Name)
	}
	if v.ConfigMap != nil {
		w.named("configmaps", v.ConfigMap.Name, at+"configMap.name", v.Name)
	}
	if v.PersistentVolumeClaim != nil {
		w.named("persistentvolumeclaims", v.PersistentVolumeClaim.ClaimName, at+"persistentVolumeClaim.claimName", v.Name)
	}
	if v.Ephemeral != nil {
		w.add("persistentvolumeclaims", p.Name+"-"+v.Name, at+"ephemeral", v.Name)
	}
	if v.CSI != nil {
		w.wide("csidrivers", v.CSI.Driver, at+"csi", v.Name)
		w.local(v.CSI.NodePublishSecretRef, at+"csi.nodePublishSecretRef.name", v.Name)
	}
	if v.Projected != nil {
		for i := range v.Projected.Sources {
			w.projection(p, &v.Projected.Sources[i], v.Name)
		}
	}
	w.inTree(v)
}

func (w *walk) local(r *corev1.LocalObjectReference, at, of string) {
	if r != nil {
		w.named("secrets", r.Name, at, of)
	}
}

func (w *walk) projection(p *corev1.Pod, s *corev1.VolumeProjection, of string) {
	const at = "spec.volumes[].projected.sources[]."
	if s.Secret != nil {
		w.named("secrets", s.Secret.Name, at+"secret.name", of)
	}
	if s.ConfigMap != nil {
		w.named("configmaps", s.ConfigMap.Name, at+"configMap.name", of)
	}
	if s.ServiceAccountToken != nil {
		w.add("serviceaccounts", p.Spec.ServiceAccountName, at+"serviceAccountToken", of)
	}
	if b := s.ClusterTrustBundle; b != nil {
		name := ""
		if b.Name != nil {
			name = *b.Name
		}
		w.wide("clustertrustbundles", name, at+"clusterTrustBundle", of)
	}
	if s.PodCertificate != nil {
		w.add("podcertificaterequests", "", at+"podCertificate", of)
	}
}

// inTree yields the secrets of in-tree volume types.
func (w *walk) inTree(v *corev1.Volume) {
	const at = "spec.volumes[]."
	if v.AzureFile != nil {
		w.named("secrets", v.AzureFile.SecretName, at+"azureFile.secretName", v.Name)
	}
	if v.CephFS != nil {
		w.local(v.CephFS.SecretRef, at+"cephfs.secretRef.name", v.Name)
	}
	if v.Cinder != nil {
		w.local(v.Cinder.SecretRef, at+"cinder.secretRef.name", v.Name)
	}
	if v.FlexVolume != nil {
		w.local(v.FlexVolume.SecretRef, at+"flexVolume.secretRef.name", v.Name)
	}
	if v.Glusterfs != nil {
		w.named("endpoints", v.Glusterfs.EndpointsName, at+"glusterfs.endpoints", v.Name)
	}
	if v.ISCSI != nil {
		w.local(v.ISCSI.SecretRef, at+"iscsi.secretRef.name", v.Name)
	}
	if v.RBD != nil {
		w.local(v.RBD.SecretRef, at+"rbd.secretRef.name", v.Name)
	}
	if v.ScaleIO != nil {
		w.local(v.ScaleIO.SecretRef, at+"scaleIO.secretRef.name", v.Name)
	}
	if v.StorageOS != nil {
		w.local(v.StorageOS.SecretRef, at+"storageos.secretRef.name", v.Name)
	}
}
