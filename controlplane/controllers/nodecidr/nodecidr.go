package nodecidr

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// fullRetryDelay is the retry delay of a node if no block is free.
const fullRetryDelay = time.Minute

// Options configures the allocator of node CIDRs.
type Options struct {
	// ClusterCIDR is the pod network: one prefix, or two prefixes separated by a comma, one of each
	// IP family.
	ClusterCIDR string
	// NodeBits4 and NodeBits6 are the prefix lengths of the blocks of a node, by IP family. 0 means
	// 24 and 64.
	NodeBits4, NodeBits6 int
}

// Ranges returns the pod network as one Range for each IP family, or an error if it is invalid.
func (o Options) Ranges() ([]Range, error) {
	var out []Range
	for _, s := range strings.Split(o.ClusterCIDR, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return nil, fmt.Errorf("pod network %q: %w", o.ClusterCIDR, err)
		}
		bits := cmp.Or(o.NodeBits4, 24)
		if !p.Addr().Is4() {
			bits = cmp.Or(o.NodeBits6, 64)
		}
		r, err := NewRange(p, bits)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// New returns the controller that assigns one block of each range to every node. It panics if the
// pod network is invalid; callers must call Ranges before to check it.
func New(d engine.Deps, o Options) *engine.Descriptor {
	ranges, err := o.Ranges()
	if err != nil {
		panic("nodecidr: " + err.Error())
	}
	nodes := client.Informer[*corev1.Node](d.Informers)
	engine.Index(nodes, byBlock, func(o api.Object) []string { return blocksOf(o.(*corev1.Node), ranges) })
	return &engine.Descriptor{
		Name:    "node-ipam-controller",
		Workers: 1, // two workers could choose the same block
		Watches: []engine.Watch{engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
			if c.Type == engine.Deleted || len(Missing(c.New, ranges)) == 0 {
				return nil
			}
			return []engine.Key{{Name: c.New.Name}}
		})},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, ranges: ranges, next: make([]int, len(ranges)), offered: map[string]offer{},
				nodes: engine.ViewOf[*corev1.Node](t, nodes)}
			return r.reconcileNode
		},
	}
}

// byBlock indexes nodes by the range and the position of their blocks. Nodes with a prefix that
// spans several blocks are under wideBlocks. Such prefixes are set manually and are rare.
const (
	byBlock    = "pod-network-block"
	wideBlocks = "wide"
)

func blockKey(rng, position int) string { return strconv.Itoa(rng) + "/" + strconv.Itoa(position) }

// blocksOf is the index function of byBlock.
func blocksOf(n *corev1.Node, ranges []Range) []string {
	var out []string
	for _, p := range Used([]*corev1.Node{n}) {
		for i, r := range ranges {
			switch position, wide, in := r.prefixPosition(p); {
			case wide:
				out = append(out, wideBlocks)
			case in:
				out = append(out, blockKey(i, position))
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// reconciler reconciles nodes during one term of leadership. Every term has a new reconciler. It
// reads the blocks in use from the nodes each time. next is only the position at which the search
// for a free block starts.
type reconciler struct {
	term   *engine.Term
	ranges []Range
	next   []int
	nodes  *engine.View[*corev1.Node]
	// offered holds, by node name, the blocks of writes that are not visible in nodes yet.
	offered map[string]offer
}

// offer holds the blocks that a write assigns to a node. The write succeeds only if the Node has
// the UID and version of the offer. While the view shows that version, the write may still be
// committed, even if the call returned an error.
type offer struct {
	uid       types.UID
	version   string
	positions map[int]int // position of the block in each range, by the index of the range
}

// removeSettledOffers removes the offers that can no longer be committed or are visible in the
// view: the Node has another version, or no longer exists.
func (r *reconciler) removeSettledOffers() {
	maps.DeleteFunc(r.offered, func(name string, o offer) bool {
		n, ok := r.nodes.Get("", name)
		return !ok || n.UID != o.uid || n.ResourceVersion != o.version
	})
}

// isTaken reports whether the block at a position of range i must not be given to node n: a node
// has it, or a write that may still be committed assigns it to another node.
func (r *reconciler) isTaken(n *corev1.Node, i, position int) bool {
	for name, o := range r.offered {
		if at, ok := o.positions[i]; ok && at == position && name != n.Name {
			return true
		}
	}
	return len(r.nodes.By(byBlock, blockKey(i, position))) > 0
}

func (r *reconciler) reconcileNode(ctx context.Context, key engine.Key) (time.Duration, error) {
	r.removeSettledOffers()
	n, ok := r.nodes.Get("", key.Name)
	if !ok || n.DeletionTimestamp != nil {
		return 0, nil
	}
	missing := Missing(n, r.ranges)
	if len(missing) == 0 {
		return 0, nil
	}
	node := n.DeepCopy()
	if len(node.Spec.PodCIDRs) == 0 && node.Spec.PodCIDR != "" {
		node.Spec.PodCIDRs = []string{node.Spec.PodCIDR}
	}
	wide := Used(r.nodes.By(byBlock, wideBlocks))
	positions := map[int]int{}
	for _, i := range missing {
		rng, from := r.ranges[i], r.next[i]
		if at, ok := r.offered[n.Name].positions[i]; ok {
			from = at // a repeated write offers the same block again
		}
		block, position, ok := rng.Next(func(at int) bool { return r.isTaken(n, i, at) }, wide, from)
		if !ok {
			r.term.Events.Eventf(n, corev1.EventTypeWarning, "CIDRNotAvailable",
				"Node %s status is now: CIDRNotAvailable: no block left in %s", n.Name, rng)
			return fullRetryDelay, nil
		}
		node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, block.String())
		positions[i] = position
	}
	node.Spec.PodCIDR = node.Spec.PodCIDRs[0]
	r.offered[n.Name] = offer{uid: n.UID, version: n.ResourceVersion, positions: positions}
	for i, position := range positions {
		r.next[i] = (position + 1) % r.ranges[i].Size()
	}
	node, err := client.Update(ctx, r.term.Client, node)
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("assigning a pod CIDR to node %s: %w", key.Name, err)
	}
	r.nodes.RecordWrite(node)
	return 0, nil
}

// Missing returns the indexes of the ranges from which node n needs a block. These are all ranges
// for a new node, and the second range after the cluster has become dual-stack.
func Missing(n *corev1.Node, ranges []Range) []int {
	has := map[bool]bool{}
	for _, p := range Used([]*corev1.Node{n}) {
		has[p.Addr().Is4()] = true
	}
	var out []int
	for i, r := range ranges {
		if !has[r.cluster.Addr().Is4()] {
			out = append(out, i)
		}
	}
	return out
}

// Used returns the blocks that the nodes have, as prefixes.
func Used(nodes []*corev1.Node) []netip.Prefix {
	var out []netip.Prefix
	for _, n := range nodes {
		list := n.Spec.PodCIDRs
		if len(list) == 0 && n.Spec.PodCIDR != "" {
			list = []string{n.Spec.PodCIDR}
		}
		for _, s := range list {
			if p, err := netip.ParsePrefix(s); err == nil {
				out = append(out, p)
			}
		}
	}
	return out
}
