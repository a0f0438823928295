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

// cluster is what is measured: a lab, or with -kubeconfig an API alone.
type cluster struct {
	loan   *borrow.Loan // nil = an API alone
	hosts  []string     // of the replicas, where there is no lab and they are several
	config *rest.Config // through the forwarder
	client kubernetes.Interface
	meter  procfs.Meter
	daemon map[lab.Role][]daemon
}

// daemon is one of Keelson's processes.
type daemon struct {
	host string
	pid  int
}

func (b *bench) openCluster(ctx context.Context) (*cluster, error) {
	c := &cluster{daemon: map[lab.Role][]daemon{}}
	kubeconfig := b.kubeconfig
	if kubeconfig == "" {
		b.Say("looking for a lab, or making one")
		loan, err := borrow.Lab(b.Progress, 3)
		if err != nil {
			return nil, err
		}
		c.loan, kubeconfig = loan, loan.Config.Kubeconfig
		c.findDaemons(ctx)
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err == nil {
		err = c.through(config)
	}
	if err != nil {
		_ = c.close()
		return nil, fmt.Errorf("a client from %s: %w", kubeconfig, err)
	}
	return c, nil
}

// through makes the cluster's client.
func (c *cluster) through(config *rest.Config) (err error) {
	c.config = rest.CopyConfig(config)
	// Both sides speak protobuf, as the components of Kubernetes do.
	c.config.ContentType, c.config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	c.config.QPS, c.config.Burst = -1, 0
	c.client, err = kubernetes.NewForConfig(c.config)
	return err
}

// findDaemons notes whose CPU time is told with every measure: the daemons', and
// everything of a worker together, where the short-lived processes are.
func (c *cluster) findDaemons(ctx context.Context) {
	c.meter = procfs.Meter{Processes: map[string]int{}, Groups: map[string]string{"lab": "/keelson-lab"}, Whole: []string{"lab"}}
	for _, h := range c.loan.Status(ctx) {
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

func (c *cluster) close() error {
	if c.loan == nil {
		return nil
	}
	return c.loan.Return()
}

// workers are the names of the lab's nodes.
func (c *cluster) workers() []string {
	var out []string
	for _, d := range c.daemon[lab.RoleWorker] {
		out = append(out, d.host)
	}
	return out
}

// connections are n clients with a connection each. In a lab they go past the
// forwarder, which is no part of the product, to all replicas in turn.
func (c *cluster) connections(n int) ([]rest.Interface, error) {
	var replicas []lab.Host
	if c.loan != nil {
		for _, h := range c.loan.Config.Hosts {
			if h.Role == lab.RoleControlPlane {
				replicas = append(replicas, h)
			}
		}
	}
	var out []rest.Interface
	for i := range n {
		cfg := rest.CopyConfig(c.config)
		// A dial function of its own gives each client a transport of its own.
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

// namespace makes a namespace in which pods may be created. The function takes it
// away; it returns when nothing of it is left.
func (c *cluster) namespace(ctx context.Context) (string, func() error, error) {
	ns, err := c.client.CoreV1().Namespaces().Create(ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "bench-"}}, metav1.CreateOptions{})
	if err != nil {
		return "", nil, fmt.Errorf("making a namespace: %w", err)
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
			return fmt.Errorf("namespace %s is still there", ns.Name)
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
