package statefulset

import (
	"maps"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

var kind = appsv1.SchemeGroupVersion.WithKind("StatefulSet")

func ownerRef(set *appsv1.StatefulSet) metav1.OwnerReference {
	return *metav1.NewControllerRef(set, kind)
}

// firstOrdinal returns the ordinal of the first pod of a StatefulSet.
func firstOrdinal(set *appsv1.StatefulSet) int {
	if set.Spec.Ordinals == nil {
		return 0
	}
	return int(set.Spec.Ordinals.Start)
}

func replicasOrDefault(set *appsv1.StatefulSet) int {
	if set.Spec.Replicas == nil {
		return 1
	}
	return int(*set.Spec.Replicas)
}

func podName(set *appsv1.StatefulSet, ordinal int) string {
	return set.Name + "-" + strconv.Itoa(ordinal)
}

// ordinalOf returns the ordinal in the name of a pod. ok is false if the StatefulSet creates no
// pods with such a name.
func ordinalOf(set *appsv1.StatefulSet, pod string) (ordinal int, ok bool) {
	digits, ok := strings.CutPrefix(pod, set.Name+"-")
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(digits)
	return n, err == nil && n >= 0 && podName(set, n) == pod
}

// claimName returns the name of the claim from a claim template for the pod with this ordinal.
func claimName(set *appsv1.StatefulSet, template *corev1.PersistentVolumeClaim, ordinal int) string {
	return template.Name + "-" + podName(set, ordinal)
}

// newPod returns the pod with this ordinal. template is the pod template of revision.
func newPod(set *appsv1.StatefulSet, template *corev1.PodTemplateSpec, revision string, ordinal int) *corev1.Pod {
	p := engine.PodFrom(set, ownerRef(set), template)
	p.GenerateName, p.Name = "", podName(set, ordinal)
	p.Spec.Hostname, p.Spec.Subdomain = p.Name, set.Spec.ServiceName
	setIdentity(set, p, ordinal)
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	p.Labels[appsv1.ControllerRevisionHashLabelKey] = revision
	return p
}

// identityLabels returns the labels that identify the pod with this ordinal.
func identityLabels(set *appsv1.StatefulSet, ordinal int) map[string]string {
	return map[string]string{
		appsv1.StatefulSetPodNameLabel: podName(set, ordinal),
		appsv1.PodIndexLabel:           strconv.Itoa(ordinal),
	}
}

// hasIdentity reports whether pod p has the labels that identityLabels returns for its ordinal.
func hasIdentity(set *appsv1.StatefulSet, p *corev1.Pod, ordinal int) bool {
	for k, v := range identityLabels(set, ordinal) {
		if p.Labels[k] != v {
			return false
		}
	}
	return true
}

// setIdentity sets the labels of its ordinal on pod p. If p was not created yet, it also adds the
// volumes for its claims.
func setIdentity(set *appsv1.StatefulSet, p *corev1.Pod, ordinal int) {
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	maps.Copy(p.Labels, identityLabels(set, ordinal))
	if p.UID != "" {
		return
	}
	own := map[string]bool{}
	var volumes []corev1.Volume
	for i := range set.Spec.VolumeClaimTemplates {
		t := &set.Spec.VolumeClaimTemplates[i]
		own[t.Name] = true
		volumes = append(volumes, corev1.Volume{Name: t.Name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claimName(set, t, ordinal)},
		}})
	}
	for _, v := range p.Spec.Volumes { // a claim template replaces a volume with the same name
		if !own[v.Name] {
			volumes = append(volumes, v)
		}
	}
	p.Spec.Volumes = volumes
}

// newClaims returns the claims to create for the pod with this ordinal.
func newClaims(set *appsv1.StatefulSet, ordinal int) []*corev1.PersistentVolumeClaim {
	var out []*corev1.PersistentVolumeClaim
	for i := range set.Spec.VolumeClaimTemplates {
		t := set.Spec.VolumeClaimTemplates[i].DeepCopy()
		c := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: set.Namespace, Name: claimName(set, t, ordinal), Annotations: t.Annotations,
				Labels: t.Labels,
			},
			Spec: t.Spec,
		}
		if c.Labels == nil {
			c.Labels = map[string]string{}
		}
		if set.Spec.Selector != nil {
			maps.Copy(c.Labels, set.Spec.Selector.MatchLabels)
		}
		engine.CopyTrace(c, set)
		if refs, changed := claimOwners(set, podName(set, ordinal), nil, c); changed {
			c.OwnerReferences = refs
		}
		out = append(out, c)
	}
	return out
}
