package core_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
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
		{"the older field", corev1.PersistentVolumeClaimSpec{DataSource: from},
			corev1.PersistentVolumeClaimSpec{DataSource: from, DataSourceRef: ref}},
		{"the newer field", corev1.PersistentVolumeClaimSpec{DataSourceRef: ref},
			corev1.PersistentVolumeClaimSpec{DataSource: from, DataSourceRef: ref}},
		{"another namespace", corev1.PersistentVolumeClaimSpec{DataSourceRef: elsewhere},
			corev1.PersistentVolumeClaimSpec{DataSourceRef: elsewhere}},
		{"what validation refuses", corev1.PersistentVolumeClaimSpec{DataSourceRef: wrong},
			corev1.PersistentVolumeClaimSpec{
				DataSource: &corev1.TypedLocalObjectReference{Kind: "Pod", Name: "a"}, DataSourceRef: wrong}},
	} {
		claim := &corev1.PersistentVolumeClaim{Spec: c.set}
		podspec.DefaultClaim(claim)
		if !fieldrules.SemanticEqual(claim.Spec.DataSource, c.want.DataSource) ||
			!fieldrules.SemanticEqual(claim.Spec.DataSourceRef, c.want.DataSourceRef) {
			t.Errorf("%s: %+v, %+v", c.about, claim.Spec.DataSource, claim.Spec.DataSourceRef)
		}
	}
}

// F110: a dataSourceRef with a namespace is dropped, unless the stored claim has a dataSourceRef. Its feature gate,
// CrossNamespaceVolumeDataSource, is off by default in Kubernetes.
func TestClaimsDropSourcesOfOtherNamespaces(t *testing.T) {
	group, other, empty := "snapshot.storage.k8s.io", "other", ""
	from := &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "a"}
	ref := &corev1.TypedObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "a"}
	elsewhere := &corev1.TypedObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "a", Namespace: &other}
	nowhere := &corev1.TypedObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "a", Namespace: &empty}
	type spec = corev1.PersistentVolumeClaimSpec
	for about, c := range map[string]struct{ set, want spec }{
		"another namespace": {spec{DataSourceRef: elsewhere}, spec{}},
		"with dataSource": {spec{DataSourceRef: elsewhere, DataSource: from},
			spec{DataSourceRef: ref, DataSource: from}},
		"without a namespace":     {spec{DataSourceRef: ref}, spec{DataSourceRef: ref, DataSource: from}},
		"with an empty namespace": {spec{DataSourceRef: nowhere}, spec{DataSourceRef: nowhere, DataSource: from}},
	} {
		claim := &corev1.PersistentVolumeClaim{Spec: *c.set.DeepCopy()}
		k := kinds.All().ByType(claim)
		k.Writes.Default(claim)
		k.Writes.PrepareCreate(claim)
		changed, old := &corev1.PersistentVolumeClaim{Spec: *c.set.DeepCopy()}, &corev1.PersistentVolumeClaim{}
		k.Writes.PrepareUpdate(changed, old)
		for _, got := range []*corev1.PersistentVolumeClaim{claim, changed} {
			if !fieldrules.SemanticEqual(got.Spec.DataSource, c.want.DataSource) ||
				!fieldrules.SemanticEqual(got.Spec.DataSourceRef, c.want.DataSourceRef) {
				t.Errorf("%s: %+v, %+v", about, got.Spec.DataSource, got.Spec.DataSourceRef)
			}
		}
		stored := &corev1.PersistentVolumeClaim{Spec: spec{DataSourceRef: elsewhere.DeepCopy()}}
		again := stored.DeepCopy()
		k.Writes.PrepareUpdate(again, stored)
		if !fieldrules.SemanticEqual(again.Spec.DataSourceRef, elsewhere) {
			t.Errorf("%s: an update of a stored claim left %+v", about, again.Spec.DataSourceRef)
		}
	}
}
