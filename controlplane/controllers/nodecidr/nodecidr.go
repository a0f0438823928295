package nodecidr

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// retryFull is when a node for which no block was free is looked at again.
const retryFull = time.Minute

// Options of the allocator.
type Options struct {
	// ClusterCIDR is the pod network: one prefix, or one of each family with a comma between.
	ClusterCIDR string
	// NodeBits4 and NodeBits6 are the prefix lengths of a node's blocks; 0 = 24 and 64.
	NodeBits4, NodeBits6 int
}

// Ranges cuts the pod network.
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

// New returns the allocator of node CIDRs: one block of each range for every
// node. A pod network that cannot be cut is a programming error (check Ranges
// where it is configured) and panics.
func New(d controllers.Deps, o Options) *controllers.Controller {
	ranges, err := o.Ranges()
	if err != nil {
		panic("nodecidr: " + err.Error())
	}
	nodes := client.Informer[*corev1.Node](d.Informers)
	controllers.Index(nodes, byBlock, func(o api.Object) []string { return blocksOf(o.(*corev1.Node), ranges) })
	return &controllers.Controller{
		Name:    "node-ipam-controller",
		Workers: 1, // two at once could choose the same block
		Watches: []controllers.Watch{controllers.OnInformer(nodes, func(c controllers.Change[*corev1.Node]) []controllers.Key {
			if c.Type == controllers.Deleted || len(Missing(c.New, ranges)) == 0 {
				return nil
			}
			return []controllers.Key{{Name: c.New.Name}}
		})},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			r := &reconciler{term: t, ranges: ranges, next: make([]int, len(ranges)), nodes: controllers.ViewOf[*corev1.Node](t, nodes)}
			return r.reconcile
		},
	}
}

// byBlock finds nodes by what they have of the ranges: by the range and the position of a block, or, those with a block that
// reaches over several, under wideBlocks. Somebody set such a block by hand: they are few.
const (
	byBlock    = "pod-network-block"
	wideBlocks = "wide"
)

func blockKey(rng, position int) string { return strconv.Itoa(rng) + "/" + strconv.Itoa(position) }

// blocksOf is where byBlock finds a node.
func blocksOf(n *corev1.Node, ranges []Range) []string {
	var out []string
	for _, p := range Used([]*corev1.Node{n}) {
		for i, r := range ranges {
			switch position, wide, in := r.place(p); {
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

// reconciler is the thin shell of one leadership. What is taken is looked up at the nodes each time; next only says where to
// look first.
type reconciler struct {
	term   *controllers.Term
	ranges []Range
	next   []int
	nodes  *controllers.View[*corev1.Node]
}

func (r *reconciler) reconcile(ctx context.Context, key controllers.Key) (time.Duration, error) {
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
	at := map[int]int{}
	for _, i := range missing {
		rng := r.ranges[i]
		block, position, ok := rng.Next(func(at int) bool { return len(r.nodes.By(byBlock, blockKey(i, at))) > 0 }, wide, r.next[i])
		if !ok {
			r.term.Events.Eventf(n, corev1.EventTypeWarning, "CIDRNotAvailable", "Node %s status is now: CIDRNotAvailable: no block left in %s", n.Name, rng)
			return retryFull, nil
		}
		node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, block.String())
		at[i] = position
	}
	node.Spec.PodCIDR = node.Spec.PodCIDRs[0]
	node, err := client.Update(ctx, r.term.Client, node)
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil && !apierrors.IsConflict(err) && !errors.Is(err, context.Canceled):
		// The answer may be lost although the write was not: do not offer this block to another node soon.
		for i, position := range at {
			r.next[i] = position
		}
		return 0, fmt.Errorf("giving node %s its pod CIDR: %w", key.Name, err)
	case err != nil:
		return 0, fmt.Errorf("giving node %s its pod CIDR: %w", key.Name, err)
	}
	r.nodes.Wrote(node)
	for i, position := range at {
		r.next[i] = (position + 1) % r.ranges[i].Size()
	}
	return 0, nil
}

// Missing are the ranges, by their place, of whose family a node has no block yet: all of a new one's, the second one's
// when a cluster has got a second family.
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

// Used are the blocks that nodes have.
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
