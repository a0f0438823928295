package registry

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/registry/fieldowners"
	"keelson.dev/keelson/internal/memory/memtest"
)

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
			share := fieldowners.NewSetShare()
			s := e.cache.ByKind(e.kinds.ByType(pod("", "")))
			key := s.Key("default", "p1")
			value := s.Current(key).Value
			b.ReportAllocs()
			for b.Loop() {
				obj, _, err := s.Codec().DecodeNamed(key, value)
				if err != nil {
					b.Fatal(err)
				}
				share.ShareFields(obj)
			}
			b.ReportMetric(float64(live)/pods, "heap-bytes/pod")
			b.ReportMetric(float64(l.Bytes)/float64(len(l.Items)), "stored-bytes/pod")
		})
	}
}
