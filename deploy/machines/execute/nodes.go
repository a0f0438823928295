package execute

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/deploy/machines"
	"keelson.dev/keelson/deploy/machines/plan"
	"keelson.dev/keelson/internal/wait"
)

// awaitNodes waits until all named nodes are ready, and prints a line for each. It returns the
// state of all nodes of the cluster. changed contains the names of the nodes with an agent that was
// just installed or changed. For these nodes, it also waits until their pod network works.
func (s *Site) awaitNodes(ctx context.Context, names, changed []string) (nodes map[string]plan.Node, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready in %v", readyTimeout))
	defer cancel()
	told, seen := map[string]bool{}, readyCounts{}
	missing := ""
	err = wait.For(ctx, pollInterval, func() error {
		if nodes, err = s.queryNodes(ctx); err != nil {
			return err
		}
		var errs []error
		for _, name := range names {
			if err := seen.checkNode(name, slices.Contains(changed, name), nodes); err != nil {
				errs = append(errs, err)
				missing = name
			} else if !told[name] {
				s.Printf("node %s is ready", name)
				told[name] = true
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		err = fmt.Errorf("waiting for nodes: %w", err)
		if missing != "" {
			err = s.withJournal(ctx, missing, machines.Worker, err)
		}
	}
	return nodes, err
}

// readyCounts contains, by node, the number of successive checks in which the node was ready.
type readyCounts map[string]int

// checkNode returns the reason why a node is not ready, or nil. changed means that the node's agent
// was just installed or changed. The pod network of such a node must also work in two successive
// checks. The reason is that an agent reports Ready before it has set up routes and rules, and
// reports their failures later.
func (l readyCounts) checkNode(name string, changed bool, nodes map[string]plan.Node) error {
	n, ok := nodes[name]
	well := l[name]
	l[name] = 0
	switch {
	case !ok:
		return fmt.Errorf("there is no node %s yet", name)
	case !n.Ready:
		return fmt.Errorf("node %s: %s", name, n.Why)
	case changed && n.Network != "":
		return fmt.Errorf("node %s: its pods are not reachable: %s", name, n.Network)
	}
	if l[name] = well + 1; changed && well == 0 {
		return fmt.Errorf("node %s: its agent has just started", name)
	}
	return nil
}

// withJournal returns err with the last lines of a daemon's log. The daemon is the replica or the
// agent on the named machine, according to the role r. If the log cannot be read, it returns err
// unchanged.
func (s *Site) withJournal(ctx context.Context, name string, r machines.Role, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	said, _ := s.runScript(ctx, name, 10*time.Second, "journalctl -u "+r.UnitName()+" -n 8 --no-pager -o cat", nil)
	if said = strings.TrimSpace(said); said != "" {
		return fmt.Errorf("%w\n%s of %s says:\n%s", err, r.UnitName(), name, said)
	}
	return err
}

// applyMarks sets the labels and taints of the cluster file on the named Nodes, and then their
// annotation plan.RecordAnnotation. It removes labels and taints that are no longer in the cluster
// file. nodes contains the current state of the Nodes by name.
func (s *Site) applyMarks(ctx context.Context, names []string, nodes map[string]plan.Node) error {
	for _, name := range names {
		h, err := s.Cluster.Host(name)
		if err != nil {
			return err
		}
		m := plan.NodeMarks(h, nodes[name])
		var labels, taints []string
		labels = append(labels, m.Label...)
		for _, k := range m.Unlabel {
			labels = append(labels, k+"-")
		}
		taints = append(taints, m.Taint...)
		for _, t := range m.Untaint {
			taints = append(taints, t+"-")
		}
		note := "keelson.dev/cluster-file=" + m.Record
		if m.Record == "-" {
			note = "keelson.dev/cluster-file-"
		}
		for _, of := range []struct {
			verb  string
			words []string
		}{{"label", labels}, {"taint", taints}, {"annotate", []string{note}}} {
			if len(of.words) == 0 || of.verb == "annotate" && m.Record == "" {
				continue
			}
			if _, err := s.runKctl(ctx, apiTimeout,
				append([]string{of.verb, "node", name, "--overwrite"}, of.words...)...); err != nil {
				return fmt.Errorf("%s of node %s: %w", of.verb, name, err)
			}
		}
		if len(labels)+len(taints) > 0 {
			s.Printf("node %s has the labels and taints of the file", name)
		}
	}
	return nil
}

// adminKubeconfig returns the content of an administrator's kubeconfig for the user root on the
// named machine. Its server is the replica on that machine. If 'keelson-controlplane init' got the
// flag --kubeconfig-server, the server is that address.
func (s *Site) adminKubeconfig(ctx context.Context, name string) (string, error) {
	raw, err := s.Kubeconfig(ctx)
	if err != nil {
		return "", err
	}
	h, err := s.Cluster.Host(name)
	if err != nil {
		return "", err
	}
	for _, f := range s.Cluster.Init {
		if strings.HasPrefix(f, "--kubeconfig-server=") {
			return string(raw), nil
		}
	}
	raw, err = WithServer(raw, h.Address)
	return string(raw), err
}

// WithServer returns a copy of the kubeconfig raw with the given address as its server. The port
// stays the same.
func WithServer(raw []byte, address string) ([]byte, error) {
	c, err := clientcmd.Load(raw)
	if err != nil {
		return nil, err
	}
	for _, cluster := range c.Clusters {
		u, err := url.Parse(cluster.Server)
		if err != nil {
			return nil, err
		}
		port := u.Port()
		if port == "" {
			port = "443"
		}
		u.Host = net.JoinHostPort(address, port)
		cluster.Server = u.String()
	}
	return clientcmd.Write(*c)
}
