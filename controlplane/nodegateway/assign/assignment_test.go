package assign

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway/policy"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// world is an objectSource and policy.Source that a test changes.
type world struct {
	there   map[key]api.Object
	watched map[key]int
	objects *changeLog
	nodes   *changeLog
	batches uint64
	policed *policy.Index
	marks   []key // keys marked by a change besides the changed object
	rev     int
}

func newWorld(maxDeletions int) *world {
	w := &world{there: make(map[key]api.Object), watched: make(map[key]int), objects: newChangeLog(maxDeletions),
		nodes: newChangeLog(maxDeletions)}
	w.policed = policy.New(w)
	return w
}

// view returns a view of the world's logs and policies, without feeds.
func (w *world) view() *View {
	return &View{objects: w.objects, peers: w.nodes, groups: &policyGroups{index: w.policed}}
}

func (w *world) lookUpObject(k key) (api.Object, bool) {
	if k.kind == kindAddressGroup || k.kind == kindNetworkPolicy {
		return w.view().lookUpObject(k)
	}
	o, ok := w.there[k]
	return o, ok
}
func (w *world) listReferences(o api.Object) []key {
	return feedSource{view: w.view()}.listReferences(o)
}
func (w *world) encodeObject(k kind, o api.Object) (*fleetv1.Object, error) {
	return encodeObject(k, o)
}
func (w *world) readObjects(r readRequest) (uint64, bool, error) { return w.objects.readSince(r) }
func (w *world) readPeers(r readRequest) (uint64, bool, error)   { return w.nodes.readSince(r) }
func (w *world) batchCount() uint64                              { return w.batches }

// Peer implements policy.Source.
func (w *world) Peer(p *v1.Pod) *v1.Pod { return p }

// Pod implements policy.Source.
func (w *world) Pod(namespace, name string) (*v1.Pod, bool) {
	p, ok := w.there[key{kindPod, namespace, name}].(*v1.Pod)
	return p, ok
}

// Pods, Namespace and Namespaces implement policy.Source with a single namespace.
func (w *world) Pods(string) (pods []*v1.Pod) {
	for _, o := range w.there {
		if p, ok := o.(*v1.Pod); ok {
			pods = append(pods, p)
		}
	}
	return pods
}
func (w *world) Namespace(string) (*v1.Namespace, bool) { return nil, false }
func (w *world) Namespaces() []*v1.Namespace            { return nil }

func (w *world) watchObject(k key)   { w.watched[k]++ }
func (w *world) unwatchObject(k key) { w.watched[k]-- }
func (w *world) set(k key, o api.Object) {
	w.rev++
	o.SetNamespace(k.namespace)
	o.SetName(k.name)
	o.SetUID(uidOf(k))
	o.SetResourceVersion(strconv.Itoa(w.rev))
	old := w.there[k]
	w.there[k] = o
	w.publish(k, old, o)
}

func uidOf(k key) types.UID { return types.UID(fmt.Sprint(k.kind, k.name)) }

func (w *world) remove(k key) {
	o, ok := w.there[k]
	if !ok {
		return
	}
	delete(w.there, k)
	w.publish(k, o, nil)
}

// publish writes a change to the logs, as the view does.
func (w *world) publish(k key, old, now api.Object) {
	v := w.view()
	w.batches++
	switch {
	case k.kind == kindNode:
		oldNode, _ := old.(*v1.Node)
		node, _ := now.(*v1.Node)
		v.handleNodeChange(k, oldNode, node)
	case k.kind == kindPod:
		was, _ := old.(*v1.Pod)
		is, _ := now.(*v1.Pod)
		for _, g := range w.policed.UpdatePod(was, is) {
			w.marks = append(w.marks, key{kindAddressGroup, "", g})
		}
	case k.kind == kindNetworkPolicy:
		is, _ := now.(*networkingv1.NetworkPolicy)
		made, _ := w.policed.SetPolicy(k.namespace, k.name, is)
		for _, g := range made {
			w.marks = append(w.marks, key{kindAddressGroup, "", g})
		}
		w.marks = append(w.marks, k)
		for k := range w.there {
			if k.kind == kindPod {
				w.marks = append(w.marks, k)
			}
		}
	case kinds[k.kind].onAllNodes && now == nil:
		v.publishObject(k.kind, nil, old)
	case kinds[k.kind].onAllNodes:
		v.publishObject(k.kind, now, now)
	}
}

// sets returns the parts of a change after a round trip through the wire form.
func sets(t rapid.TB, c change, full bool) []*fleetv1.ObjectSet {
	t.Helper()
	var out []*fleetv1.ObjectSet
	for _, set := range c.splitIntoSets(full) {
		raw, err := proto.Marshal(set)
		if err != nil {
			t.Fatal(err)
		}
		if len(raw) > 2*partBytes {
			t.Errorf("a part has %d bytes", len(raw))
		}
		got := &fleetv1.ObjectSet{}
		if err := proto.Unmarshal(raw, got); err != nil {
			t.Fatal(err)
		}
		out = append(out, got)
	}
	return out
}

// F93: after any sequence of changes, the agent holds exactly the objects that it must at their
// present revisions. These are all Services, its own pods with the closure of their references, its
// own Node, and the information about other nodes.
func TestAssignmentFollowsTheObjects(t *testing.T) {
	for name, peers := range map[string]*digest{"an agent": {}, "an agent that does not know peers": nil} {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { followsTheWorld(t, Resumption{peers: peers}) })
		})
	}
}

func followsTheWorld(t *rapid.T, has Resumption) {
	{
		w := newWorld(2)
		a := newAssignment("w1", w, has)
		held := make(map[key]string)
		dirty := make(map[key]bool)
		name := func(of string) string { return fmt.Sprint(of, rapid.IntRange(0, 2).Draw(t, of)) }
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			k, o := drawObject(t, name)
			if rapid.IntRange(0, 3).Draw(t, "delete") == 0 {
				w.remove(k)
			} else {
				w.set(k, o)
			}
			// As in the view: pods and the own Node always, objects for every node never, others
			// when watched.
			if k.kind == kindPod || k == ownNode || w.watched[k] > 0 {
				dirty[k] = true
			}
			for _, k := range w.marks {
				if k.kind == kindPod || w.watched[k] > 0 {
					dirty[k] = true
				}
			}
			w.marks = nil
			if rapid.Bool().Draw(t, "coalesce") {
				continue
			}
			a = flush(t, a, dirty, held)
			check(t, w, held, has.peers != nil)
		}
		a = flush(t, a, dirty, held)
		check(t, w, held, has.peers != nil)
		a.unwatchAll()
		for k, n := range w.watched {
			if n != 0 {
				t.Fatalf("%v is watched %d times after release", k, n)
			}
		}
	}
}

var ownNode = key{kind: kindNode, name: "w1"}

func drawObject(t *rapid.T, name func(string) string) (key, api.Object) {
	switch rapid.IntRange(0, 8).Draw(t, "kind") {
	case 0:
		p := &v1.Pod{Spec: v1.PodSpec{NodeName: rapid.SampledFrom([]string{"w1", "w2", ""}).Draw(t, "node")}}
		p.Labels = map[string]string{"app": name("app")}
		if rapid.Bool().Draw(t, "has an address") {
			p.Status.PodIP = "192.0.2.9"
		}
		p.Spec.Volumes = []v1.Volume{
			{Name: "c",
				VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{
					LocalObjectReference: v1.LocalObjectReference{Name: name("cm")}}}},
			{Name: "p",
				VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
					ClaimName: name("pvc")}}},
		}
		class := name("class")
		p.Spec.RuntimeClassName = &class
		return key{kindPod, "default", name("pod")}, p
	case 1:
		return key{kindConfigMap, "default", name("cm")}, &v1.ConfigMap{}
	case 2:
		return key{kindClaim, "default", name("pvc")},
			&v1.PersistentVolumeClaim{Spec: v1.PersistentVolumeClaimSpec{VolumeName: name("pv")}}
	case 3:
		pv := &v1.PersistentVolume{}
		if rapid.IntRange(0, 3).Draw(t, "is bound") > 0 {
			claim := name("pvc")
			pv.Spec.ClaimRef = &v1.ObjectReference{Namespace: "default", Name: claim}
			pv.Spec.ClaimRef.UID = rapid.SampledFrom([]types.UID{"", uidOf(key{kindClaim, "default", claim}),
				"another"}).Draw(t, "uid")
		}
		pv.Spec.CSI = &v1.CSIPersistentVolumeSource{Driver: "d",
			NodeStageSecretRef: &v1.SecretReference{Namespace: "default", Name: name("secret")}}
		return key{kindPersistentVolume, "", name("pv")}, pv
	case 4:
		return key{kindSecret, "default", name("secret")}, &v1.Secret{}
	case 5:
		return key{kindRuntimeClass, "", name("class")}, &nodev1.RuntimeClass{Handler: "h"}
	case 6:
		n := &v1.Node{}
		if rapid.Bool().Draw(t, "has pods") {
			n.Spec.PodCIDR = "10." + rapid.SampledFrom([]string{"1", "2"}).Draw(t, "cidr") + ".0.0/24"
		}
		if rapid.Bool().Draw(t, "has an address") {
			n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeHostName, Address: "h"},
				{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}
		}
		return key{kindNode, "", name("w")}, n
	case 7:
		p := &networkingv1.NetworkPolicy{}
		p.Spec.PodSelector.MatchLabels = map[string]string{"app": name("app")}
		for range rapid.IntRange(0, 2).Draw(t, "peers") {
			p.Spec.Ingress = append(p.Spec.Ingress,
				networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{
					PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name("app")}}}}})
		}
		return key{kindNetworkPolicy, "default", name("np")}, p
	}
	return key{kindService, "default", name("svc")}, &v1.Service{}
}

// flush performs a step and applies it to the simulated agent. If the agent is too far behind, it
// starts with a new assignment. The assignment to continue with is returned.
func flush(t *rapid.T, a *assignment, dirty map[key]bool, held map[key]string) *assignment {
	var keys []key
	for k := range dirty {
		keys = append(keys, k)
	}
	clear(dirty)
	c, err := a.computeChange(keys)
	if errors.Is(err, errBehind) {
		w := a.source.(*world)
		keys = append(keys, ownNode)
		for k := range w.there {
			if k.kind == kindPod {
				keys = append(keys, k)
			}
		}
		a.unwatchAll()
		clear(held)
		a = newAssignment("w1", w, a.resumed)
		c, err = a.computeChange(keys)
	}
	if err != nil {
		t.Fatal(err)
	}
	find := func(name string) kind {
		if name == kindPeer {
			return kindNode
		}
		return kind(slices.IndexFunc(kinds[:], func(i kindInfo) bool { return i.name == name }))
	}
	for _, set := range sets(t, c, false) {
		for _, o := range set.Upserts {
			held[key{find(o.Kind), o.Namespace, o.Name}] = fmt.Sprint(o.Revision)
		}
		for _, p := range set.Peers {
			held[key{kind: kindNode, name: p.Name}] = told(p)
		}
		for _, r := range set.Deletes {
			delete(held, key{find(r.Kind), r.Namespace, r.Name})
		}
	}
	return a
}

// isOf reports whether a volume is bound to the claim.
func isOf(v *v1.PersistentVolume, claim api.Object) bool {
	by := v.Spec.ClaimRef
	return by != nil && by.Namespace == claim.GetNamespace() && by.Name == claim.GetName() &&
		(by.UID == "" || by.UID == claim.GetUID())
}

// told formats the peer information that an agent gets.
func told(p *fleetv1.Peer) string { return fmt.Sprint(p.Uid, p.PodCidrs, p.Addresses) }

// check compares the objects held with a closure computed from scratch.
func check(t *rapid.T, w *world, held map[key]string, peers bool) {
	want := make(map[key]string)
	var add func(k key)
	add = func(k key) {
		o, ok := w.lookUpObject(k)
		if !ok {
			return
		}
		want[k] = fmt.Sprint(wire.RevisionOf(o))
		for _, r := range w.listReferences(o) {
			if v, ok := w.there[r].(*v1.PersistentVolume); ok && !isOf(v, o) {
				continue
			}
			add(r)
		}
	}
	for k, o := range w.there {
		p, isPod := o.(*v1.Pod)
		n, isNode := o.(*v1.Node)
		switch {
		case isNode && k != ownNode && buildPeer(n) == nil:
		case isNode && k != ownNode && peers:
			want[k] = told(buildPeer(n))
		case isNode && k != ownNode:
			want[k] = "whole"
		case kinds[k.kind].onAllNodes, isPod && p.Spec.NodeName == "w1":
			add(k)
		}
	}
	for k, what := range want {
		if have, ok := held[k]; !ok || what != "whole" && have != what {
			t.Fatalf("%v is held as %q, want %q", k, have, what)
		}
	}
	for k := range held {
		if _, ok := want[k]; !ok {
			t.Fatalf("%v is held for no reason", k)
		}
	}
}

// A resuming agent is not sent the objects that it holds. It gets only the names of Services and
// EndpointSlices at a known revision, and no peers. If one peer differs, it gets all of them.
func TestResumption(t *testing.T) {
	w := newWorld(maxDeletionRecords)
	node := func(name, cidr string) {
		n := &v1.Node{Spec: v1.NodeSpec{PodCIDR: cidr}}
		n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}
		w.set(key{kind: kindNode, name: name}, n)
	}
	for i := range 3 {
		node(fmt.Sprint("w", i), fmt.Sprintf("10.%d.0.0/24", i))
		w.set(service(i), &v1.Service{})
	}
	first := func(has Resumption) (upserts, thin, peers int, kept bool) {
		c, err := newAssignment("w1", w, has).computeChange([]key{ownNode})
		if err != nil {
			t.Fatal(err)
		}
		for _, set := range sets(t, c, true) {
			kept = kept || set.PeersHeld
			peers += len(set.Peers)
			for _, o := range set.Upserts {
				if upserts++; len(o.Raw) == 0 {
					thin++
				}
			}
		}
		return upserts, thin, peers, kept
	}
	expect := func(has Resumption, upserts, thin, peers int, kept bool) {
		t.Helper()
		if u, n, p, k := first(has); u != upserts || n != thin || p != peers || k != kept {
			t.Errorf("%d objects, %d of them thin, %d peers, peers held: %v; want %d, %d, %d, %v", u, n, p, k, upserts,
				thin, peers, kept)
		}
	}
	has := w.nodes.peerDigest("w1") // digest of the other two nodes
	expect(Resumption{peers: &digest{}}, 4, 0, 2, false)
	expect(Resumption{peers: &has, revision: 4}, 4, 2, 0, true)
	expect(Resumption{}, 6, 0, 0, false)
	node("w1", "10.9.0.0/24") // its own node
	expect(Resumption{peers: &has, revision: 100}, 4, 3, 0, true)
	node("w2", "10.9.0.0/24")
	expect(Resumption{peers: &has, revision: 100}, 4, 3, 2, false)
	node("w2", "10.2.0.0/24")
	expect(Resumption{peers: &has, revision: 100}, 4, 3, 0, true)
	w.remove(key{kind: kindNode, name: "w0"})
	expect(Resumption{peers: &has, revision: 100}, 4, 3, 1, false)
}

// A node gets a volume and its Secrets for a claim only if the volume is bound to that claim. The
// order of creation and other claims with the same volume name make no difference.
func TestVolumesOfOthers(t *testing.T) {
	claim, other, volume, secret := key{kindClaim, "default", "data"}, key{kindClaim, "default", "other"},
		key{kindPersistentVolume, "", "pv"}, key{kindSecret, "team", "chap"}
	bound := func(c key, uid types.UID) api.Object {
		pv := &v1.PersistentVolume{}
		pv.Spec.CSI = &v1.CSIPersistentVolumeSource{Driver: "d",
			NodeStageSecretRef: &v1.SecretReference{Namespace: "team", Name: "chap"}}
		if c.name != "" {
			pv.Spec.ClaimRef = &v1.ObjectReference{Namespace: c.namespace, Name: c.name, UID: uid}
		}
		return pv
	}
	names := func(volume string) api.Object {
		return &v1.PersistentVolumeClaim{Spec: v1.PersistentVolumeClaimSpec{VolumeName: volume}}
	}
	type step struct {
		k    key
		o    api.Object // nil = deleted
		held bool       // whether the volume and its Secret are held afterwards
	}
	for name, steps := range map[string][]step{
		"the volume is bound to nobody": {{volume, bound(key{}, ""), false}, {claim, names("pv"), false}},
		"it is another's in another namespace": {{volume, bound(key{kindClaim, "team", "data"}, ""), false},
			{claim, names("pv"), false}},
		"it is that of a claim that was replaced": {{volume, bound(claim, "old"), false}, {claim, names("pv"), false},
			{volume, bound(claim, uidOf(claim)), true}},
		"the volume names the claim first": {{volume, bound(claim, ""), false}, {claim, names(""), false},
			{claim, names("pv"), true}},
		"the claim names the volume first": {{volume, bound(key{}, ""), false}, {claim, names("pv"), false},
			{volume, bound(claim, ""), true}, {volume, bound(other, ""), false}},
		"two name it and its own goes": {{claim, names("pv"), false}, {other, names("pv"), false},
			{volume, bound(claim, uidOf(claim)), true}, {claim, nil, false}, {claim, names("pv"), true}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(maxDeletionRecords)
			p := &v1.Pod{Spec: v1.PodSpec{NodeName: "w1"}}
			for _, c := range []key{claim, other} {
				p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: c.name, VolumeSource: v1.VolumeSource{
					PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: c.name}}})
			}
			pod := key{kindPod, "default", "p"}
			w.set(pod, p)
			w.set(secret, &v1.Secret{})
			a := newAssignment("w1", w, Resumption{})
			if _, err := a.computeChange([]key{pod}); err != nil {
				t.Fatal(err)
			}
			for i, s := range steps {
				if s.o == nil {
					w.remove(s.k)
				} else {
					w.set(s.k, s.o)
				}
				if w.watched[s.k] > 0 { // as the view does
					if _, err := a.computeChange([]key{s.k}); err != nil {
						t.Fatal(err)
					}
				}
				if a.held[volume] != nil != s.held || a.held[secret] != nil != s.held {
					t.Errorf("step %d: the volume is held: %v, its Secret: %v; want %v", i, a.held[volume] != nil,
						a.held[secret] != nil, s.held)
				}
			}
		})
	}
}
