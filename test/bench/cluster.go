package main

import (
	"context"
	"fmt"
	"net"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/procfs"
	"keelson.dev/keelson/test/testenv/borrow"
)

// cluster is the measured cluster: a lab, or only an API with -kubeconfig.
type cluster struct {
	loan   *borrow.Loan // nil = only an API
	hosts  []string     // API URLs of several replicas without a lab
	config *rest.Config // through the lab's forwarder
	client kubernetes.Interface
	meter  procfs.Meter
	daemon map[lab.Role][]daemon
}

// daemon is a process of Keelson.
type daemon struct {
	host string
	pid  int
}

func (b *benchmarks) openCluster(ctx context.Context) (*cluster, error) {
	c := &cluster{daemon: map[lab.Role][]daemon{}}
	kubeconfig := b.options.kubeconfig
	if kubeconfig == "" {
		b.tally.LogProgress("using the running lab, or creating one")
		loan, err := borrow.AcquireLab(b.tally.Progress, 3)
		if err != nil {
			return nil, err
		}
		c.loan, kubeconfig = loan, loan.Lab.Config.Kubeconfig
		c.findDaemons(ctx)
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err == nil {
		err = c.createClient(config)
	}
	if err != nil {
		_ = c.returnLab()
		return nil, fmt.Errorf("creating a client from %s: %w", kubeconfig, err)
	}
	return c, nil
}

// createClient sets the cluster's API client from config.
func (c *cluster) createClient(config *rest.Config) (err error) {
	c.config = rest.CopyConfig(config)
	// The client uses protobuf, as the components of Kubernetes do.
	c.config.ContentType, c.config.AcceptContentTypes = "application/vnd.kubernetes.protobuf",
		"application/vnd.kubernetes.protobuf,application/json"
	c.config.QPS, c.config.Burst = -1, 0
	c.client, err = kubernetes.NewForConfig(c.config)
	return err
}

// findDaemons sets the processes and cgroups whose cost is measured: each daemon, and each worker's
// whole cgroup with its short-lived processes.
func (c *cluster) findDaemons(ctx context.Context) {
	c.meter = procfs.Meter{Processes: map[string]int{}, Groups: map[string]string{"lab": "/keelson-lab"},
		Whole: []string{"lab"}}
	for _, h := range c.loan.Lab.Status(ctx) {
		if h.PID == 0 || h.Role == lab.RoleRegistry {
			continue
		}
		c.daemon[h.Role] = append(c.daemon[h.Role], daemon{h.Name, h.PID})
		c.meter.Processes[h.Name] = h.PID
		if h.Role == lab.RoleWorker {
			c.meter.Groups[h.Name+" in all"] = h.CgroupPath()
		}
	}
}

func (c *cluster) returnLab() error {
	if c.loan == nil {
		return nil
	}
	return c.loan.Return()
}

// workerNames returns the names of the lab's nodes.
func (c *cluster) workerNames() []string {
	var out []string
	for _, d := range c.daemon[lab.RoleWorker] {
		out = append(out, d.host)
	}
	return out
}

// newConnections returns n clients with one connection each. In a lab they connect to all replicas
// in turn and bypass the forwarder, which is not a part of the product.
func (c *cluster) newConnections(n int) ([]rest.Interface, error) {
	var replicas []lab.Host
	if c.loan != nil {
		for _, h := range c.loan.Lab.Config.Hosts {
			if h.Role == lab.RoleControlPlane {
				replicas = append(replicas, h)
			}
		}
	}
	var out []rest.Interface
	for i := range n {
		cfg := rest.CopyConfig(c.config)
		// A separate dial function gives each client its own transport.
		cfg.Dial = (&net.Dialer{Timeout: 5 * time.Second}).DialContext
		if len(c.hosts) > 0 {
			cfg.Host = c.hosts[i%len(c.hosts)]
		}
		if len(replicas) > 0 {
			h := replicas[i%len(replicas)]
			cfg.Host = fmt.Sprintf("https://%s:%d", h.IP, lab.APIPort)
			cfg.Dial = func(ctx context.Context, _, address string) (net.Conn, error) { return h.Dial(ctx, address) }
		}
		cs, err := kubernetes.NewForConfig(cfg)
		if err != nil {
			return nil, err
		}
		out = append(out, cs.CoreV1().RESTClient())
	}
	return out, nil
}

// createNamespace creates a namespace and waits until pods can be created in it. The returned
// function deletes the namespace and waits until it is gone.
func (c *cluster) createNamespace(ctx context.Context) (string, func() error, error) {
	ns, err := c.client.CoreV1().Namespaces().Create(ctx,
		&v1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "bench-"}}, metav1.CreateOptions{})
	if err != nil {
		return "", nil, fmt.Errorf("creating a namespace: %w", err)
	}
	remove := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		zero := int64(0)
		err := c.client.CoreV1().Namespaces().Delete(ctx, ns.Name, metav1.DeleteOptions{GracePeriodSeconds: &zero})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("deleting namespace %s: %w", ns.Name, err)
		}
		return wait.For(ctx, 50*time.Millisecond, func() error {
			_, err := c.client.CoreV1().Namespaces().Get(ctx, ns.Name, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
				return nil
			case err != nil:
				return err
			}
			return fmt.Errorf("namespace %s still exists", ns.Name)
		})
	}
	ready, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	err = wait.For(ready, 20*time.Millisecond, func() error {
		_, err := c.client.CoreV1().ServiceAccounts(ns.Name).Get(ready, "default", metav1.GetOptions{})
		return err
	})
	if err != nil {
		_ = remove()
		return "", nil, fmt.Errorf("waiting for the service account of namespace %s: %w", ns.Name, err)
	}
	return ns.Name, remove, nil
}
