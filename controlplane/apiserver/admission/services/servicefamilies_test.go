package services

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// F117: a replica without knowledge of the second family lets Services keep it, but adds it to no
// other Service.
func TestFamiliesThatAServiceHas(t *testing.T) {
	both := corev1.IPFamilyPolicyRequireDualStack
	four, six := corev1.IPv4Protocol, corev1.IPv6Protocol
	made := func() *corev1.Service {
		return &corev1.Service{Spec: corev1.ServiceSpec{Selector: map[string]string{"a": "b"}, IPFamilyPolicy: &both,
			IPFamilies: []corev1.IPFamily{four, six}, ClusterIP: "10.96.0.9",
			ClusterIPs: []string{"10.96.0.9", "fd96::9"}}}
	}
	one := []corev1.IPFamily{four}
	kept := made()
	if errs := chooseFamilies(kept, one, []corev1.IPFamily{four, six}); len(errs) > 0 ||
		!slices.Equal(kept.Spec.ClusterIPs, made().Spec.ClusterIPs) {
		t.Errorf("%v: %+v", errs, kept.Spec)
	}
	if errs := chooseFamilies(made(), one, one); len(errs) != 1 {
		t.Errorf("a second family that there is not: %v", errs)
	}
}
