package soak

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/test/testenv/loopback"
)

// clusterShape is the size and configuration of a cluster.
type clusterShape struct {
	replicas, nodes int
	heartbeat       time.Duration // of the nodes; 0 = as ever
	store           datadir.StoreOptions
	run             func(context.Context, server.Config) error // runs a replica; nil = in this process
}

// startCluster runs a cluster until the end of the test and returns a client of the first replica.
func startCluster(t *testing.T, s clusterShape) *kubernetes.Clientset {
	t.Helper()
	dir := t.TempDir()
	var nodes sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	plane, err := loopback.Start(ctx, dir, loopback.Shape{
		Name: "soak", Replicas: s.replicas, Heartbeat: s.heartbeat, Store: s.store, Run: s.run, Ready: patience,
	})
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		nodes.Wait()
		if err := plane.Stop(); err != nil {
			t.Error(err)
		}
	})
	first, err := kubernetes.NewForConfig(plane.Configs[0])
	if err != nil {
		t.Fatal(err)
	}
	for i := range s.nodes {
		name := fmt.Sprintf("w%d", i+1)
		a := loopback.Agent{Name: name, Servers: []string{plane.Fleet}, Token: plane.Founded.NodeToken,
			Dir: filepath.Join(dir, name), Events: true}
		nodes.Go(func() {
			if err := a.Run(ctx); err != nil && ctx.Err() == nil {
				t.Errorf("node %s: %v", name, err)
			}
		})
	}
	// A Node exists before its agent's first report has reached every replica, so the Leases are awaited with it.
	eventually(t, "a heartbeat of every node", func() error {
		list, err := first.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(list.Items) < s.nodes {
			return fmt.Errorf("%d of %d nodes", len(list.Items), s.nodes)
		}
		leases, err := first.CoordinationV1().Leases(v1.NamespaceNodeLease).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		renewed := 0
		for _, l := range leases.Items {
			if l.Spec.RenewTime != nil {
				renewed++
			}
		}
		if renewed < s.nodes {
			return fmt.Errorf("%d of %d Leases were renewed", renewed, s.nodes)
		}
		return nil
	})
	return first
}
