package garbagecollector

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

var configMaps = &api.Kind{GVK: corev1.SchemeGroupVersion.WithKind("ConfigMap"), Namespaced: true}

// graph is a cluster of ConfigMaps that own each other. An owner named "?" is of an unknown kind.
type graph struct {
	objects map[types.UID]*corev1.ConfigMap
	steps   []string
}

// newGraph creates objects from "a:b,c!": a is owned by b, and by c, whose deletion it blocks.
func newGraph(objects ...string) *graph {
	g := &graph{objects: map[types.UID]*corev1.ConfigMap{}}
	for _, text := range objects {
		name, owners, _ := strings.Cut(text, ":")
		o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)}}
		for _, owner := range strings.FieldsFunc(owners, func(r rune) bool { return r == ',' }) {
			bare, block := strings.CutSuffix(owner, "!")
			o.OwnerReferences = append(o.OwnerReferences, metav1.OwnerReference{
				APIVersion: "v1", Kind: "ConfigMap", Name: bare, UID: types.UID(bare), BlockOwnerDeletion: &block})
		}
		g.objects[o.UID] = o
	}
	return g
}

func (g *graph) delete(uid types.UID, policy metav1.DeletionPropagation) {
	o := g.objects[uid]
	g.steps = append(g.steps, fmt.Sprintf("%s deletion of %s", policy, uid))
	if policy != metav1.DeletePropagationForeground {
		delete(g.objects, uid)
		return
	}
	o.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	o.Finalizers = []string{metav1.FinalizerDeleteDependents}
}

func (g *graph) owners(o api.Object) (out []Owner, err error) {
	for _, r := range o.GetOwnerReferences() {
		owner, ok := g.objects[r.UID]
		switch {
		case r.UID == "?":
			out = append(out, Owner{Ref: r, State: Solid})
		case ok:
			out = append(out, Owner{Ref: r, State: stateOf(owner), Object: owner})
		default:
			out = append(out, Owner{Ref: r, State: Absent})
		}
	}
	return out, nil
}

func (g *graph) dependents(o api.Object) (out []api.Object) {
	for _, d := range g.objects {
		if holdsUp(d, o, configMaps) {
			out = append(out, d)
		}
	}
	return out
}

// visit performs one step of the collector for an object. It reports whether anything changed.
func (g *graph) visit(o *corev1.ConfigMap) bool {
	if stateOf(o) == Waiting {
		if !MayGo(o, g.dependents) {
			return false
		}
		g.steps = append(g.steps, "end of "+o.Name)
		delete(g.objects, o.UID)
		return true
	}
	owners, _ := g.owners(o)
	held, _, _ := Held(o, g.owners)
	v := Judge(o, owners, held, func() bool {
		for _, d := range g.objects {
			if ownedBy(d, o.UID) {
				return true
			}
		}
		return false
	})
	switch {
	case v.Delete != "":
		g.delete(o.UID, v.Delete)
	case len(v.Detach) > 0:
		g.steps = append(g.steps, fmt.Sprintf("%s let go of %s", o.Name, uids(v.Detach)))
		o.OwnerReferences = slices.DeleteFunc(o.OwnerReferences, func(r metav1.OwnerReference) bool {
			return slices.Contains(uids(v.Detach), r.UID)
		})
	default:
		return false
	}
	return true
}

// settle visits all objects in any order until no visit changes anything.
func (g *graph) settle(random *rand.Rand) bool {
	for range 1000 {
		changed := false
		for _, o := range g.inAnyOrder(random) {
			if g.objects[o.UID] == o && g.visit(o) {
				changed = true
			}
		}
		if !changed {
			return true
		}
	}
	return false
}

func (g *graph) inAnyOrder(random *rand.Rand) []*corev1.ConfigMap {
	var all []*corev1.ConfigMap
	for _, uid := range g.uids() {
		all = append(all, g.objects[uid])
	}
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

func (g *graph) uids() (out []types.UID) {
	for uid := range g.objects {
		out = append(out, uid)
	}
	slices.Sort(out)
	return out
}

// survivors is the slow twin of the collector: it returns the objects that stay after deletions,
// computed from the whole graph at once.
func survivors(refs map[types.UID][]types.UID, deleted []types.UID) (out []types.UID) {
	there := map[types.UID]bool{}
	for uid := range refs {
		there[uid] = !slices.Contains(deleted, uid)
	}
	for again := true; again; {
		again = false
		above := map[[2]types.UID]bool{} // [a b]: b owns a, directly or not
		for a, owners := range refs {
			for _, b := range owners {
				above[[2]types.UID{a, b}] = there[a] && there[b]
			}
		}
		for b := range refs {
			for a := range refs {
				for c := range refs {
					if above[[2]types.UID{a, b}] && above[[2]types.UID{b, c}] {
						above[[2]types.UID{a, c}] = true
					}
				}
			}
		}
		for a := range refs {
			lost, held := false, false
			for b := range refs {
				inCircle := a == b || above[[2]types.UID{a, b}] && above[[2]types.UID{b, a}]
				if !inCircle {
					continue
				}
				for _, owner := range refs[b] {
					back := owner == a || above[[2]types.UID{owner, a}]
					lost = lost || owner != "?" && !there[owner]
					held = held || owner == "?" || there[owner] && !back
				}
			}
			if there[a] && lost && !held {
				there[a], again = false, true
			}
		}
	}
	for uid, is := range there {
		if is {
			out = append(out, uid)
		}
	}
	slices.Sort(out)
	return out
}

// F71: over random graphs with circles of every length, foreground and background deletions
// complete in any order of events, and leave the same objects as the slow twin.
func TestRandomGraphs(t *testing.T) {
	for seed := range uint64(4000) {
		random := rand.New(rand.NewPCG(seed, 1))
		n := 1 + random.IntN(8)
		var objects []string
		refs := map[types.UID][]types.UID{}
		for i := range n {
			name := types.UID(string(rune('a' + i)))
			refs[name] = nil
			var owners []string
			for range random.IntN(4) {
				owner := types.UID(string(rune('a' + random.IntN(n+1)))) // the last one does not exist
				if random.IntN(20) == 0 {
					owner = "?"
				}
				if !slices.Contains(refs[name], owner) {
					refs[name] = append(refs[name], owner)
					owners = append(owners, string(owner)+[]string{"", "!"}[min(1, random.IntN(4))])
				}
			}
			objects = append(objects, string(name)+":"+strings.Join(owners, ","))
		}
		g := newGraph(objects...)
		var deleted []types.UID
		for range random.IntN(4) {
			if left := g.uids(); len(left) > 0 {
				uid := left[random.IntN(len(left))]
				deleted = append(deleted, uid)
				g.delete(uid, []metav1.DeletionPropagation{metav1.DeletePropagationBackground,
					metav1.DeletePropagationForeground}[random.IntN(2)])
			}
			for range random.IntN(10) {
				if all := g.inAnyOrder(random); len(all) > 0 {
					g.visit(all[0])
				}
			}
		}
		ended := g.settle(random)
		if got, want := g.uids(), survivors(refs, deleted); !ended || !slices.Equal(got, want) {
			t.Fatalf("seed %d: %s\n%s\nsettled %v with %v, want %v", seed, strings.Join(objects, " "),
				strings.Join(g.steps, "\n"), ended, got, want)
		}
	}
}

func TestCircles(t *testing.T) {
	foreground, background := metav1.DeletePropagationForeground, metav1.DeletePropagationBackground
	for _, c := range []struct {
		why     string
		objects []string
		delete  types.UID
		policy  metav1.DeletionPropagation
		want    string
	}{
		{"a circle of one that nobody touches", []string{"a:a!", "x:"}, "x", background, "[a]"},
		{"a circle of one", []string{"a:a!"}, "a", foreground, "[]"},
		{"a circle of two", []string{"a:b!", "b:a!"}, "a", foreground, "[]"},
		{"a circle of three", []string{"a:b!", "b:c!", "c:a!"}, "a", foreground, "[]"},
		{"a circle of five, in the background", []string{"a:b!", "b:c!", "c:d!", "d:e!", "e:a!"}, "c",
			background, "[]"},
		{"two circles through one object", []string{"a:b!", "b:a!,c!", "c:b!"}, "c", foreground, "[]"},
		{"a circle and what hangs on it", []string{"a:b!", "b:c!", "c:a!", "d:b!", "e:d!"}, "a", foreground, "[]"},
		{"a circle loses its only outer owner", []string{"x:", "a:b,x", "b:a"}, "x", background, "[]"},
		{"a circle loses one of two outer owners", []string{"x:", "y:", "a:b,x", "b:a,y"}, "x", background, "[a b y]"},
		{"a circle below one that nobody touches", []string{"x:", "a:b,x", "b:a,c", "c:c"}, "x", foreground, "[a b c]"},
		{"a circle held by a stranger", []string{"x:", "a:b,x", "b:a,?"}, "x", foreground, "[a b]"},
	} {
		t.Run(c.why, func(t *testing.T) {
			g := newGraph(c.objects...)
			g.delete(c.delete, c.policy)
			if ended := g.settle(rand.New(rand.NewPCG(1, 1))); !ended || fmt.Sprint(g.uids()) != c.want {
				t.Errorf("settled %v with %v, want %s\n%s", ended, g.uids(), c.want, strings.Join(g.steps, "\n"))
			}
		})
	}
}

// The dependents of a circle are deleted before the circle.
func TestCircleWaitsForItsDependents(t *testing.T) {
	g := newGraph("a:b!", "b:c!", "c:a!", "d:b!")
	for _, uid := range []types.UID{"a", "b", "c"} {
		g.delete(uid, metav1.DeletePropagationForeground)
	}
	for _, uid := range []types.UID{"a", "b", "c"} {
		if g.visit(g.objects[uid]) {
			t.Errorf("%s went before d, which depends on its circle", uid)
		}
	}
	delete(g.objects, "d")
	for _, uid := range []types.UID{"c", "a", "b"} {
		if !g.visit(g.objects[uid]) {
			t.Errorf("%s waits although nothing holds its circle up", uid)
		}
	}
}
