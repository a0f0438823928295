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

// CreateAgentlessNodes creates nodes without agents and waits until pods may be bound to them. They
// stay Ready until an agent of the same name connects: a replica marks only nodes that had a
// session as lost.
func (p *Plane) CreateAgentlessNodes(ctx context.Context, count int) error {
	cs, err := kubernetes.NewForConfig(p.Configs[0])
	if err != nil {
		return err
	}
	var parts sync.WaitGroup
	errs := make([]error, nodesAtOnce)
	for c := range nodesAtOnce {
		parts.Go(func() {
			for i := c; i < count && errs[c] == nil; i += nodesAtOnce {
				errs[c] = createAgentlessNode(ctx, cs, i)
			}
		})
	}
	parts.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nodePatience)
	defer cancel()
	err = wait.For(ctx, 100*time.Millisecond, func() error { return requireNoTaints(ctx, cs) })
	if err != nil {
		return fmt.Errorf("waiting for the nodes: %w", err)
	}
	return nil
}

// createAgentlessNode creates a node that is Ready. It sets the node's pod CIDR, because the
// cluster's CIDR is too small for so many nodes. The controller that allocates pod CIDRs would
// otherwise retry during the measurement.
func createAgentlessNode(ctx context.Context, cs *kubernetes.Clientset, i int) error {
	name, addresses := fmt.Sprintf("node-%04d", i), fmt.Sprintf("100.%d.%d.0/24", 64+i/256, i%256)
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}},
		Spec: v1.NodeSpec{PodCIDR: addresses, PodCIDRs: []string{addresses}}}
	if _, err := cs.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("making node %s: %w", name, err)
	}
	const has = `{"status":{"capacity":{"cpu":"64","memory":"256Gi","pods":"110"},"allocatable":{"cpu":"64",` +
		`"memory":"256Gi","pods":"110"},` +
		`"conditions":[{"type":"Ready","status":"True","reason":"Bench"}]}}`
	if _, err := cs.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(has), metav1.PatchOptions{},
		"status"); err != nil {
		return fmt.Errorf("update the status of node %s: %w", name, err)
	}
	return nil
}

// requireNoTaints returns an error while a node has a taint.
func requireNoTaints(ctx context.Context, cs *kubernetes.Clientset) error {
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
