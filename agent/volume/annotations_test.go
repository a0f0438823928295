package volume

import (
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The annotations of a PersistentVolume set its group, and mount options that replace mountOptions.
// F38
func TestVolumeAnnotations(t *testing.T) {
	for _, c := range []struct {
		annotations map[string]string
		group       int64 // -1 = none
		options     []string
	}{
		{nil, -1, []string{"noatime"}},
		{map[string]string{groupAnnotation: "4711"}, 4711, []string{"noatime"}},
		{map[string]string{groupAnnotation: "staff"}, -1, []string{"noatime"}},
		{map[string]string{groupAnnotation: "-5"}, -1, []string{"noatime"}},
		{map[string]string{v1.MountOptionAnnotation: "ro,nosuid, "}, -1, []string{"ro", "nosuid"}},
	} {
		pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Annotations: c.annotations},
			Spec: v1.PersistentVolumeSpec{MountOptions: []string{"noatime"}}}
		group := int64(-1)
		if g := volumeGroup(pv); g != nil {
			group = *g
		}
		if options := withAnnotatedOptions(pv).Spec.MountOptions; group != c.group ||
			!slices.Equal(options, c.options) {
			t.Errorf("%v: group %d, options %q", c.annotations, group, options)
		}
		if !slices.Equal(pv.Spec.MountOptions, []string{"noatime"}) {
			t.Errorf("%v: the stored volume changed", c.annotations)
		}
	}
}

// A claim's mount carries the group of its PersistentVolume. F38
func TestMountsCarryTheGroup(t *testing.T) {
	v, c, _ := newVolumes(t)
	claim := newLocalClaim(c, v1.LocalVolumeSource{Path: t.TempDir()})
	pv, _ := c.PersistentVolume("pv")
	pv = pv.DeepCopy()
	pv.Spec.MountOptions, pv.Annotations = nil, map[string]string{groupAnnotation: "4711"}
	c.Put(pv)
	m, err := v.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	if g := m["data"].Group; g == nil || *g != 4711 {
		t.Errorf("the group of %+v is %v", m["data"], g)
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}

// A PersistentVolume with hostPath cannot have mount options: the error names them. Without them it
// is mounted. F38
func TestHostPathWithMountOptions(t *testing.T) {
	v, c, dir := newVolumes(t)
	claim := newLocalClaim(c, v1.LocalVolumeSource{})
	stored, _ := c.PersistentVolume("pv")
	pv := stored.DeepCopy()
	pv.Spec.PersistentVolumeSource = v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: dir}}
	pv.Spec.MountOptions = []string{"ro"}
	c.Put(pv)
	const want = `persistentvolume "pv": mount options are not supported for this volume type: remove mountOptions`
	if _, err := v.MountAll(t.Context(), newPod("u1", claim)); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("with options: %v, want %s", err, want)
	}
	pv = pv.DeepCopy()
	pv.Spec.MountOptions = nil
	c.Put(pv)
	_, err := v.MountAll(t.Context(), newPod("u1", claim))
	requireNoError(t, err)
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
}
