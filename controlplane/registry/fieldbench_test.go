package registry

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/memory/memtest"
)

// BenchmarkFieldForm measures the forms of stored managedFields: the stored bytes of a pod,
// encoding and decoding.
func BenchmarkFieldForm(b *testing.B) {
	e := newEnv(b)
	made := e.create(pod("default", "p"))
	set := made.GetManagedFields()[0].FieldsV1.Raw
	text, _ := packFields(nil, set)
	b.Run("write", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, ok := packFields(nil, set); !ok {
				b.Fatal("it does not fit")
			}
		}
		b.ReportMetric(float64(len(set)), "long-bytes")
		b.ReportMetric(float64(len(text)), "short-bytes")
	})
	b.Run("read", func(b *testing.B) {
		b.ReportAllocs()
		var out []byte
		for b.Loop() {
			var err error
			if out, err = unpackFields(out[:0], text); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkPodsInCache measures the live heap and store size of 10,000 equal pods created by a
// user. It also measures the time from the store to the cache per pod.
func BenchmarkPodsInCache(b *testing.B) {
	const pods = 10_000
	for _, short := range []bool{false, true} {
		b.Run(fmt.Sprint("short=", short), func(b *testing.B) {
			e := newEnv(b, WithShortFields(func() bool { return short }))
			e.create(pod("default", "first"))
			before := memtest.LiveHeap()
			for i := range pods {
				e.create(pod("default", fmt.Sprint("p", i)))
			}
			l, err := e.list(pod("default", ""), metav1.ListOptions{})
			if err != nil {
				b.Fatal(err)
			}
			live := memtest.LiveHeap() - before
			s := e.cache.routes.Load().byKind[e.kinds.ByType(pod("", ""))]
			it := s.get(objectKey(s.kind, "default", "p1"))
			b.ReportAllocs()
			for b.Loop() {
				obj, _, err := s.codec.decodeNamed(it.key, it.value)
				if err != nil {
					b.Fatal(err)
				}
				e.cache.shared.shareFields(obj)
			}
			b.ReportMetric(float64(live)/pods, "heap-bytes/pod")
			b.ReportMetric(float64(l.Bytes)/float64(len(l.Items)), "stored-bytes/pod")
		})
	}
}
