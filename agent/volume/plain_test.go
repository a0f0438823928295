package volume

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// The size of an emptyDir in memory is the smaller of its limit and the memory limit of the pod.
func TestMemorySize(t *testing.T) {
	const mi = 1 << 20
	for _, c := range []struct {
		limit string // of the volume
		each  []string
		want  int64
	}{
		{"", nil, 0},
		{"", []string{"64Mi", "32Mi"}, 96 * mi},
		{"", []string{"64Mi", ""}, 0},
		{"16Mi", []string{"64Mi", "32Mi"}, 16 * mi},
		{"1Ti", []string{"64Mi", "32Mi"}, 96 * mi},
		{"16Mi", []string{"64Mi", ""}, 16 * mi},
		{"0", []string{"64Mi"}, 64 * mi},
	} {
		src, p := &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}, newPod("u")
		if c.limit != "" {
			q := resource.MustParse(c.limit)
			src.SizeLimit = &q
		}
		p.Spec.Containers = nil
		for _, m := range c.each {
			var one v1.Container
			if m != "" {
				one.Resources.Limits = v1.ResourceList{v1.ResourceMemory: resource.MustParse(m)}
			}
			p.Spec.Containers = append(p.Spec.Containers, one)
		}
		if got := memorySize(p, src); got != c.want {
			t.Errorf("limit %q, containers %q: %d, want %d", c.limit, c.each, got, c.want)
		}
	}
}

// F129: a volume in memory is at most as large as the pod's own memory limit.
func TestMemorySizeOfPodWithLimit(t *testing.T) {
	p := newPod("u")
	p.Spec.Containers = []v1.Container{{Name: "a"}, {Name: "b"}}
	p.Spec.Resources = &v1.ResourceRequirements{Limits: v1.ResourceList{v1.ResourceMemory: resource.MustParse("64Mi")}}
	small, large := resource.MustParse("32Mi"), resource.MustParse("1Gi")
	for _, c := range []struct {
		limit *resource.Quantity
		want  int64
	}{{nil, 64 << 20}, {&small, 32 << 20}, {&large, 64 << 20}} {
		if got := memorySize(p, &v1.EmptyDirVolumeSource{SizeLimit: c.limit}); got != c.want {
			t.Errorf("limit %v: %d bytes, want %d", c.limit, got, c.want)
		}
	}
}
