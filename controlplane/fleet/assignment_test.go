package fleet

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// world is a source that a test changes at will.
type world struct {
	objects map[key]api.Object
	watched map[key]int
	board   *board
	rev     int
}

func newWorld(mostGone int) *world {
	return &world{objects: make(map[key]api.Object), watched: make(map[key]int), board: newBoard(mostGone)}
}

func (w *world) lookup(k key) (api.Object, bool) { o, ok := w.objects[k]; return o, ok }
func (w *world) encoded(k kind, o api.Object) (*fleetv1.Object, error) {
	return encode(k, o)
}
func (w *world) since(at uint64) ([]post, uint64, error) { return w.board.since(at) }

func (w *world) watch(k key)   { w.watched[k]++ }
func (w *world) unwatch(k key) { w.watched[k]-- }
func (w *world) set(k key, o api.Object) {
	w.rev++
	o.SetNamespace(k.namespace)
	o.SetName(k.name)
	o.SetUID(types.UID(fmt.Sprint(k.kind, k.name)))
	o.SetResourceVersion(strconv.Itoa(w.rev))
	w.objects[k] = o
	w.tell(k, o.GetUID())
}

func (w *world) remove(k key) {
	o, ok := w.objects[k]
	if !ok {
		return
	}
	delete(w.objects, k)
	w.tell(k, o.GetUID())
}

// tell writes on the board what everyone is told, as the view does.
func (w *world) tell(k key, uid types.UID) {
	if _, there := w.objects[k]; kinds[k.kind].everyone {
		w.board.put(k, uid, !there)
	}
}

// F93: whatever changes in whatever order, after each step the agent holds exactly what it must: all Services, its own pods, and the
// closure of what those reference, each at its present revision.
func TestAssignmentFollowsTheWorld(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(2)
		a := newAssignment("w1", w)
		held := make(map[key]uint64)
		dirty := make(map[key]bool)
		name := func(of string) string { return fmt.Sprint(of, rapid.IntRange(0, 2).Draw(t, of)) }
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			k, o := drawObject(t, name)
			if rapid.IntRange(0, 3).Draw(t, "delete") == 0 {
				w.remove(k)
			} else {
				w.set(k, o)
			}
			// As the view does: pods always, what everyone is told never, the rest when watched.
			if k.kind == kindPod || w.watched[k] > 0 {
				dirty[k] = true
			}
			if rapid.Bool().Draw(t, "coalesce") {
				continue
			}
			a = flush(t, a, dirty, held)
			check(t, w, held)
		}
		a = flush(t, a, dirty, held)
		check(t, w, held)
		a.release()
		for k, n := range w.watched {
			if n != 0 {
				t.Fatalf("%v is watched %d times after release", k, n)
			}
		}
	})
}

func drawObject(t *rapid.T, name func(string) string) (key, api.Object) {
	switch rapid.IntRange(0, 6).Draw(t, "kind") {
	case 0:
		p := &v1.Pod{Spec: v1.PodSpec{NodeName: rapid.SampledFrom([]string{"w1", "w2", ""}).Draw(t, "node")}}
		p.Spec.Volumes = []v1.Volume{
			{Name: "c", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: name("cm")}}}},
			{Name: "p", VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name("pvc")}}},
		}
		class := name("class")
		p.Spec.RuntimeClassName = &class
		return key{kindPod, "default", name("pod")}, p
	case 1:
		return key{kindConfigMap, "default", name("cm")}, &v1.ConfigMap{}
	case 2:
		return key{kindClaim, "default", name("pvc")}, &v1.PersistentVolumeClaim{Spec: v1.PersistentVolumeClaimSpec{VolumeName: name("pv")}}
	case 3:
		pv := &v1.PersistentVolume{}
		pv.Spec.CSI = &v1.CSIPersistentVolumeSource{Driver: "d", NodeStageSecretRef: &v1.SecretReference{Namespace: "default", Name: name("secret")}}
		return key{kindPersistentVolume, "", name("pv")}, pv
	case 4:
		return key{kindSecret, "default", name("secret")}, &v1.Secret{}
	case 5:
		return key{kindRuntimeClass, "", name("class")}, &nodev1.RuntimeClass{Handler: "h"}
	}
	return key{kindService, "default", name("svc")}, &v1.Service{}
}

// flush performs a step and plays the agent. One that was not told of a deletion for too long begins anew: the assignment
// that goes on is returned.
func flush(t *rapid.T, a *assignment, dirty map[key]bool, held map[key]uint64) *assignment {
	var keys []key
	for k := range dirty {
		keys = append(keys, k)
	}
	clear(dirty)
	c, err := a.step(keys)
	if errors.Is(err, errBehind) {
		w := a.src.(*world)
		for k := range w.objects {
			if k.kind == kindPod {
				keys = append(keys, k)
			}
		}
		a.release()
		clear(held)
		a = newAssignment("w1", w)
		c, err = a.step(keys)
	}
	if err != nil {
		t.Fatal(err)
	}
	find := func(name string) kind {
		return kind(slices.IndexFunc(kinds[:], func(i kindInfo) bool { return i.name == name }))
	}
	for _, set := range c.parts(false) {
		for _, o := range set.Upserts {
			held[key{find(o.Kind), o.Namespace, o.Name}] = o.Revision
		}
		for _, r := range set.Deletes {
			delete(held, key{find(r.Kind), r.Namespace, r.Name})
		}
	}
	return a
}

// check compares with the closure worked out from nothing.
func check(t *rapid.T, w *world, held map[key]uint64) {
	want := make(map[key]uint64)
	var add func(k key)
	add = func(k key) {
		if o, ok := w.objects[k]; ok {
			want[k] = revisionOf(o)
			for _, r := range references(o) {
				add(r)
			}
		}
	}
	for k, o := range w.objects {
		if p, ok := o.(*v1.Pod); kinds[k.kind].everyone || ok && p.Spec.NodeName == "w1" {
			add(k)
		}
	}
	for k, rev := range want {
		if held[k] != rev {
			t.Fatalf("%v is held at %d, want %d", k, held[k], rev)
		}
	}
	for k := range held {
		if _, ok := want[k]; !ok {
			t.Fatalf("%v is held for no reason", k)
		}
	}
}
