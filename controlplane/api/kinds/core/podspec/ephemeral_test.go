package podspec_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// What a pod may say of the claims that are made for it: labels and annotations, a specification, and volume names that
// make names of claims which nothing else of the pod means.
func TestEphemeralVolumeClaims(t *testing.T) {
	template := func(change func(c *corev1.PersistentVolumeClaimTemplate)) corev1.Volume {
		c := &corev1.PersistentVolumeClaimTemplate{
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod},
				Resources: corev1.VolumeResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}}
		change(c)
		return corev1.Volume{Name: "tmp",
			VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: c}}}
	}
	nothing := func(*corev1.PersistentVolumeClaimTemplate) {}
	named := func(claim string) corev1.Volume {
		return corev1.Volume{Name: "other",
			VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
				ClaimName: claim}}}
	}
	const meta = "spec.volumes[0].ephemeral.volumeClaimTemplate.metadata."
	for _, c := range []struct {
		what, pod string
		volumes   []corev1.Volume
		want      []string
	}{
		{"plain", "web", []corev1.Volume{template(nothing), named("data")}, nil},
		{"labels", "web", []corev1.Volume{template(func(c *corev1.PersistentVolumeClaimTemplate) {
			c.Labels = map[string]string{"a": "b"}
		})}, nil},
		{"a wrong label", "web", []corev1.Volume{template(func(c *corev1.PersistentVolumeClaimTemplate) {
			c.Labels = map[string]string{"a": "-"}
		})}, []string{meta + "labels"}},
		{"a name and a finalizer", "web", []corev1.Volume{template(func(c *corev1.PersistentVolumeClaimTemplate) {
			c.ObjectMeta = metav1.ObjectMeta{Name: "n", Finalizers: []string{"f"}}
		})}, []string{meta + "name", meta + "finalizers"}},
		{"no size", "web", []corev1.Volume{template(func(c *corev1.PersistentVolumeClaimTemplate) {
			c.Spec.Resources.Requests = nil
		})},
			[]string{"spec.volumes[0].ephemeral.volumeClaimTemplate.spec.resources[storage]"}},
		{"the same claim twice", "web", []corev1.Volume{template(nothing), named("web-tmp")},
			[]string{"spec.volumes[1].persistentVolumeClaim.claimName"}},
		{"no name of a claim", "Web_1", []corev1.Volume{template(nothing)}, []string{"spec.volumes[0].name"}},
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: c.pod}, Spec: corev1.PodSpec{Volumes: c.volumes}}
		at := field.NewPath("spec", "volumes")
		_, errs := podspec.ValidateVolumes(p.Spec.Volumes, at)
		var got []string
		for _, e := range append(errs, podspec.ValidateOwnClaims(p, at)...) {
			got = append(got, e.Field)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
}
