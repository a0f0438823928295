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
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry/storedform"
)

// BenchmarkCreatePod measures the registry's part of a pod creation, with the store in memory. It
// creates the pod as a built-in component, and as a user with field tracking.
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
					req := &api.Request{User: e.user, Verb: api.VerbCreate, Kind: k, Namespace: "default",
						Name: p.Name, Object: p}
					if _, err := e.Registry.Create(e.ctx, req, nil); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}

// BenchmarkWatchFanOut measures the delivery of one change, as JSON, to 1,000 watchers.
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
				o := metav1.ListOptions{ResourceVersion: storedform.FormatRevision(e.store.Applied())}
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

// BenchmarkListPods measures LIST of 10,000 pods: object pointers for internal callers, and the
// protobuf response.
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
				req.Internal.Pointers = pointers
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
		if _, err := e.Registry.GetObject(e.ctx, req); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCreatePodReplicated measures creations by 64 concurrent callers over three replicas in
// this process, without fsync.
func BenchmarkCreatePodReplicated(b *testing.B) {
	for _, user := range []string{api.UserController, "alice"} {
		b.Run("by="+user, func(b *testing.B) {
			c, envs := replicated(b)
			e := envs[c.Leader()]
			k := e.kinds.ByType(pod("", ""))
			var n atomic.Int64
			b.SetParallelism(32) // times GOMAXPROCS
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					p := pod("default", fmt.Sprint("p", n.Add(1)))
					req := &api.Request{User: api.User{Name: user}, Verb: api.VerbCreate, Kind: k, Namespace: "default",
						Name: p.Name, Object: p}
					if _, err := e.Registry.Create(e.ctx, req, nil); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}

// BenchmarkTrackNewPod compares the two ways to compute managedFields of a new pod.
func BenchmarkTrackNewPod(b *testing.B) {
	r := New(nil, kinds.All())
	p := pod("default", "p")
	k := r.kinds.ByType(p)
	k.SetTypeMeta(p)
	fm, err := fieldManager(r, k, "")
	if err != nil {
		b.Fatal(err)
	}
	empty := k.Type.New()
	k.SetTypeMeta(empty)
	b.Run("by=fieldmanager", func(b *testing.B) {
		for b.Loop() {
			p.ManagedFields = nil
			fm.UpdateNoErrors(empty, p, "m")
		}
	})
	n := newObjectTracker(r, k)
	b.Run("by=newcomer", func(b *testing.B) {
		for b.Loop() {
			p.ManagedFields = nil
			if _, err := n.Entries(p, "m", "v1", metav1.Time{}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkCustomObject measures the creation of a custom object, and its decoding from the store
// into the cache.
func BenchmarkCustomObject(b *testing.B) {
	e := newEnv(b)
	k := widgetKind()
	if err := e.kinds.Register(k); err != nil {
		b.Fatal(err)
	}
	made := 0
	b.Run("create", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			made++
			if _, err := e.Registry.Create(e.ctx, e.of(k, api.VerbCreate, widget(fmt.Sprint("w", made), 1)),
				nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("decode", func(b *testing.B) {
		c := storedform.NewCodec(k.Storage)
		data, err := c.Encode(widget("a", 1))
		if err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		for b.Loop() {
			if _, _, err := c.Decode(data); err != nil {
				b.Fatal(err)
			}
		}
	})
}
