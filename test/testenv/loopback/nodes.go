package loopback

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/internal/wait"
)

const (
	nodesAtOnce  = 64
	nodePatience = time.Minute
)

// PaperNodes makes nodes on which nobody runs, and waits until pods may be bound to them. They look ready for as long as no
// agent of their name comes: a replica loses only nodes that had a session.
func (p *Plane) PaperNodes(ctx context.Context, count int) error {
	cs, err := kubernetes.NewForConfig(p.Configs[0])
	if err != nil {
		return err
	}
	var parts sync.WaitGroup
	errs := make([]error, nodesAtOnce)
	for c := range nodesAtOnce {
		parts.Go(func() {
			for i := c; i < count && errs[c] == nil; i += nodesAtOnce {
				errs[c] = paperNode(ctx, cs, i)
			}
		})
	}
	parts.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nodePatience)
	defer cancel()
	err = wait.For(ctx, 100*time.Millisecond, func() error { return untainted(ctx, cs) })
	if err != nil {
		return fmt.Errorf("waiting for the nodes: %w", err)
	}
	return nil
}

// paperNode makes a node that looks ready. It brings its range of addresses along: the cluster's own would not do for so
// many, and the controller that gives them out would go on trying while others are measured.
func paperNode(ctx context.Context, cs *kubernetes.Clientset, i int) error {
	name, addresses := fmt.Sprintf("node-%04d", i), fmt.Sprintf("100.%d.%d.0/24", 64+i/256, i%256)
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}},
		Spec: v1.NodeSpec{PodCIDR: addresses, PodCIDRs: []string{addresses}}}
	if _, err := cs.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("making node %s: %w", name, err)
	}
	const has = `{"status":{"capacity":{"cpu":"64","memory":"256Gi","pods":"110"},"allocatable":{"cpu":"64","memory":"256Gi","pods":"110"},` +
		`"conditions":[{"type":"Ready","status":"True","reason":"Bench"}]}}`
	if _, err := cs.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(has), metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("telling what node %s has: %w", name, err)
	}
	return nil
}

// untainted fails while the control plane keeps pods from a node.
func untainted(ctx context.Context, cs *kubernetes.Clientset) error {
	list, err := cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range list.Items {
		if n := &list.Items[i]; len(n.Spec.Taints) > 0 {
			return fmt.Errorf("node %s has taint %s", n.Name, n.Spec.Taints[0].Key)
		}
	}
	return nil
}
