package registry

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// BenchmarkCreatePod is the registry's part of a pod's creation, over the store in
// memory: by one of Keelson's own parts, and by a user (whose fields are tracked).
func BenchmarkCreatePod(b *testing.B) {
	for _, user := range []string{api.UserController, "alice"} {
		b.Run("by="+user, func(b *testing.B) {
			e := newEnv(b)
			e.user = api.User{Name: user}
			k := e.kinds.ByType(pod("", ""))
			var n atomic.Int64
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					p := pod("default", fmt.Sprint("p", n.Add(1)))
					req := &api.Request{User: e.user, Verb: api.VerbCreate, Kind: k, Namespace: "default", Name: p.Name, Object: p}
					if _, err := e.Registry.Create(e.ctx, req, nil); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}

// BenchmarkWatchFanOut is one change seen, as JSON, by 1,000 watchers.
func BenchmarkWatchFanOut(b *testing.B) {
	const watchers = 1000
	for _, selective := range []bool{false, true} {
		b.Run(fmt.Sprint("ofOtherObjects=", selective), func(b *testing.B) {
			e := newEnv(b)
			e.create(pod("default", "p"))
			ctx, cancel := context.WithCancel(e.ctx)
			var running sync.WaitGroup
			var seen sync.WaitGroup
			for i := range watchers {
				o := metav1.ListOptions{ResourceVersion: formatRevision(e.store.Applied())}
				if selective && i > 0 {
					o.FieldSelector = fmt.Sprintf("metadata.name=other-%d", i)
				}
				w := e.watch(pod("default", ""), o)
				running.Go(func() {
					for {
						ev, ok := w.Next(ctx)
						if !ok {
							return
						}
						if _, err := e.Encoded(ev.Object, runtime.ContentTypeJSON); err != nil {
							b.Error(err)
						}
						seen.Done()
					}
				})
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				if selective {
					seen.Add(1)
				} else {
					seen.Add(watchers)
				}
				req := e.request(api.VerbUpdate, pod("default", "p"))
				_, err := e.Modify(e.ctx, req, nil, func(obj api.Object) error {
					obj.SetAnnotations(map[string]string{"n": fmt.Sprint(i)})
					return nil
				})
				if err != nil {
					b.Fatal(err)
				}
				seen.Wait()
			}
			b.StopTimer()
			cancel()
			running.Wait()
		})
	}
}

// BenchmarkListPods is LIST of 10,000 pods: the pointers for callers inside, and the protobuf answer.
func BenchmarkListPods(b *testing.B) {
	e := newEnv(b)
	e.user = api.User{Name: api.UserController}
	for i := range 10000 {
		e.create(pod("default", fmt.Sprint("p", i)))
	}
	for _, pointers := range []bool{true, false} {
		b.Run(fmt.Sprint("pointers=", pointers), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				req := e.request(api.VerbList, pod("default", ""))
				req.Pointers = pointers
				l, err := e.Registry.List(e.ctx, req)
				if err != nil {
					b.Fatal(err)
				}
				if pointers {
					continue
				}
				if _, err := e.Encoded(l, runtime.ContentTypeProtobuf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkGetPod(b *testing.B) {
	e := newEnv(b)
	e.create(pod("default", "p"))
	req := e.request(api.VerbGet, pod("default", "p"))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := e.Registry.Get(e.ctx, req); err != nil {
			b.Fatal(err)
		}
	}
}
