package resourceslice_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/resourceslice"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// The slices of an unregistered driver are deleted after half a minute, not earlier, and not if the
// driver returns by then. The same applies to the slices of a deleted node. Slices of an agent
// without a list, of no node, or of other drivers stay. A new leader measures the time again.
func TestResourceSlicesLeftBehind(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{resourceslice.New(d)}
			}})
		depose := w.Lead(engine.Options{})
		tell := func(node, drivers string) {
			testcluster.Update(w, node, func(n *corev1.Node) {
				n.Annotations = map[string]string{resourceslice.Drivers: drivers}
			})
		}
		for _, name := range []string{"w1", "w2", "old"} {
			w.CreateObject(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		tell("w1", "")
		tell("w2", "a.example.com,b.example.com")
		put := func(name, driver, node string) {
			s := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec: resourcev1.ResourceSliceSpec{Driver: driver,
					Pool:    resourcev1.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
					Devices: []resourcev1.Device{{Name: "d"}}}}
			if s.Spec.NodeName = &node; node == "" {
				all := true
				s.Spec.NodeName, s.Spec.AllNodes = nil, &all
			}
			w.CreateObject(s)
		}
		put("w1-a", "a.example.com", "w1")
		put("w1-b", "b.example.com", "w1")
		put("w1-b-more", "b.example.com", "w1")
		put("w2-a", "a.example.com", "w2")
		put("old-a", "a.example.com", "old")
		put("no-node", "a.example.com", "")
		is := func(after time.Duration, want ...string) {
			t.Helper()
			time.Sleep(after)
			virtual.Wait()
			list, err := client.List[*resourcev1.ResourceSlice](w.Ctx, w.Admin, "", metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range list {
				got = append(got, s.Name)
			}
			slices.Sort(got)
			if slices.Sort(want); !slices.Equal(got, want) {
				t.Errorf("there are %s, want %s", strings.Join(got, " "), strings.Join(want, " "))
			}
		}
		is(20*time.Second, "w1-a", "w1-b", "w1-b-more", "w2-a", "old-a", "no-node")
		tell("w1", "a.example.com") // in time; b is not affected
		is(20*time.Second, "w1-a", "w2-a", "old-a", "no-node")
		tell("w1", "")
		is(20*time.Second, "w1-a", "w2-a", "old-a", "no-node")
		tell("w1", "a.example.com,b.example.com")
		put("w1-b", "b.example.com", "w1")
		is(5*time.Second, "w1-a", "w1-b", "w2-a", "old-a", "no-node")
		tell("w1", "b.example.com") // away again: the time before does not count
		is(20*time.Second, "w1-a", "w1-b", "w2-a", "old-a", "no-node")
		depose()
		w.Lead(engine.Options{})
		is(20*time.Second, "w1-a", "w1-b", "w2-a", "old-a", "no-node")
		is(20*time.Second, "w1-b", "w2-a", "old-a", "no-node")
		if err := client.Delete[*corev1.Node](w.Ctx, w.Admin, "", "w2", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		is(20*time.Second, "w1-b", "w2-a", "old-a", "no-node")
		is(20*time.Second, "w1-b", "old-a", "no-node")
	})
}
