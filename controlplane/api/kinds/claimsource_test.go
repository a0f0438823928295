package kinds

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// F110: what a volume is to be made of stands in both fields, whichever a user set.
func TestClaimsHaveOneSource(t *testing.T) {
	group, other := "snapshot.storage.k8s.io", "other"
	from := &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "a"}
	ref := &corev1.TypedObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "a"}
	elsewhere := &corev1.TypedObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "a", Namespace: &other}
	wrong := &corev1.TypedObjectReference{Kind: "Pod", Name: "a"}
	for _, c := range []struct {
		about string
		set   corev1.PersistentVolumeClaimSpec
		want  corev1.PersistentVolumeClaimSpec
	}{
		{"nothing", corev1.PersistentVolumeClaimSpec{}, corev1.PersistentVolumeClaimSpec{}},
		{"the older field", corev1.PersistentVolumeClaimSpec{DataSource: from}, corev1.PersistentVolumeClaimSpec{DataSource: from, DataSourceRef: ref}},
		{"the newer field", corev1.PersistentVolumeClaimSpec{DataSourceRef: ref}, corev1.PersistentVolumeClaimSpec{DataSource: from, DataSourceRef: ref}},
		{"another namespace", corev1.PersistentVolumeClaimSpec{DataSourceRef: elsewhere}, corev1.PersistentVolumeClaimSpec{DataSourceRef: elsewhere}},
		{"what validation refuses", corev1.PersistentVolumeClaimSpec{DataSourceRef: wrong}, corev1.PersistentVolumeClaimSpec{
			DataSource: &corev1.TypedLocalObjectReference{Kind: "Pod", Name: "a"}, DataSourceRef: wrong}},
	} {
		claim := &corev1.PersistentVolumeClaim{Spec: c.set}
		defaultClaim(claim)
		if !semanticEqual(claim.Spec.DataSource, c.want.DataSource) || !semanticEqual(claim.Spec.DataSourceRef, c.want.DataSourceRef) {
			t.Errorf("%s: %+v, %+v", c.about, claim.Spec.DataSource, claim.Spec.DataSourceRef)
		}
	}
}
