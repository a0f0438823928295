// Package loopback runs a control plane in this process, or in processes that the caller begins: real replicas, each on
// a loopback address of its own, with real stores.
package loopback

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/internal/wait"
)

// Shape is what a control plane consists of.
type Shape struct {
	Name      string
	Replicas  int
	Heartbeat time.Duration // of the nodes; 0 = as ever
	Store     datadir.StoreOptions
	Run       func(context.Context, server.Config) error // runs a replica; nil = in this process
	Ready     time.Duration                              // how long each replica may take to be ready

	ClusterCIDR, ServiceCIDR string // "" = as ever, which has room for 256 nodes
	NodeTokenUses            int    // 0 = as ever
}

// Plane is a control plane that runs.
type Plane struct {
	Founded server.Founded
	Fleet   string         // the first replica's port for agents
	Configs []*rest.Config // for the API of each replica; without a limit of calls

	shape    Shape
	api      int // the ports
	fleet    int
	replicas []server.Config

	end   context.CancelFunc
	parts sync.WaitGroup
	mu    sync.Mutex
	err   error
}

// Start founds a control plane below a folder. It returns when every replica is ready.
func Start(ctx context.Context, dir string, s Shape) (*Plane, error) {
	if s.Run == nil {
		s.Run = server.Run
	}
	ctx, cancel := context.WithCancel(ctx)
	p := &Plane{shape: s, end: cancel}
	if err := p.start(ctx, dir, s); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

// Stop ends all replicas, and may be called again. The error is that of one that ended by itself.
func (p *Plane) Stop() error {
	p.end()
	p.parts.Wait()
	return p.err
}

func (p *Plane) start(ctx context.Context, dir string, s Shape) error {
	ports, err := freePorts(s.Replicas)
	if err != nil {
		return fmt.Errorf("looking for ports: %w", err)
	}
	cluster := datadir.Cluster{Name: s.Name, ClusterCIDR: s.ClusterCIDR, ServiceCIDR: s.ServiceCIDR,
		APIPort: ports[0], FleetPort: ports[1], PeerPort: ports[2]}
	p.api, p.fleet = cluster.APIPort, cluster.FleetPort
	p.Fleet = p.FleetAddress(0)
	for n := 1; n <= s.Replicas; n++ {
		name := fmt.Sprintf("cp%d", n)
		cfg := server.Config{
			Name: name, DataDir: filepath.Join(dir, name), Advertise: address(n), Version: "test",
			Log: slog.New(slog.DiscardHandler), Store: s.Store, Heartbeat: s.Heartbeat,
		}
		if n == 1 {
			p.Founded, err = server.Init(cfg, cluster, server.Founding{NodeTokenUses: s.NodeTokenUses, ReplicaTokenUses: max(1, s.Replicas-1)})
		} else {
			err = server.Join(ctx, cfg, p.Founded.ControlPlaneToken, []string{p.Fleet})
		}
		if err != nil {
			return fmt.Errorf("making replica %s: %w", name, err)
		}
		p.replicas = append(p.replicas, cfg)
		p.begin(ctx, cfg)
		if err := p.await(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// begin runs a replica.
func (p *Plane) begin(ctx context.Context, cfg server.Config) {
	p.parts.Go(func() {
		if err := wait.For(ctx, 100*time.Millisecond, func() error { return p.shape.Run(ctx, cfg) }); err != nil && ctx.Err() == nil {
			p.failed(fmt.Errorf("replica %s ended: %w", cfg.Name, err))
		}
	})
}

// Again begins the replicas anew that Stop has ended, as change makes their configurations. It returns when every one is
// ready.
func (p *Plane) Again(ctx context.Context, change func(*server.Config)) error {
	ctx, p.end = context.WithCancel(ctx)
	p.Configs = nil
	for i := range p.replicas {
		change(&p.replicas[i])
		p.begin(ctx, p.replicas[i])
	}
	for n := 1; n <= len(p.replicas); n++ {
		if err := p.await(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

func (p *Plane) failed(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = errors.Join(p.err, err)
}

// await waits until replica n is ready and adds the way to it.
func (p *Plane) await(ctx context.Context, n int) error {
	host := p.at(n-1, p.api)
	cfg, err := clientcmd.BuildConfigFromFlags("https://"+host, p.Founded.Kubeconfig)
	if err != nil {
		return err
	}
	cfg.QPS = -1
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	p.Configs = append(p.Configs, cfg)
	ctx, cancel := context.WithTimeout(ctx, p.shape.Ready)
	defer cancel()
	err = wait.For(ctx, 20*time.Millisecond, func() error {
		_, err := cs.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
	if err != nil {
		return fmt.Errorf("waiting for the API of replica %d: %w", n, err)
	}
	return nil
}

// at is a port of a replica.
func (p *Plane) at(i, port int) string { return net.JoinHostPort(address(i+1), strconv.Itoa(port)) }

// address is a loopback address of its own for each replica.
func address(n int) string { return fmt.Sprintf("127.0.0.%d", n) }

// Ports are of this range, from which the kernel takes none for connections: a replica that is begun again finds its own.
const firstPort, lastPort = 18000, 31000

// freePorts are free on the addresses of all replicas.
func freePorts(replicas int) (ports [3]int, err error) {
	var held []net.Listener
	defer func() {
		for _, l := range held {
			l.Close()
		}
	}()
	free := func(port int) (err error) {
		for n := 1; n <= replicas && err == nil; n++ {
			var l net.Listener
			if l, err = net.Listen("tcp", net.JoinHostPort(address(n), strconv.Itoa(port))); err == nil {
				held = append(held, l)
			}
		}
		return err
	}
	const tries = 1000
	for range tries {
		port := firstPort + rand.IntN(lastPort-firstPort)
		if err = free(port); err != nil {
			continue
		}
		if i := slices.Index(ports[:], 0); i < len(ports)-1 {
			ports[i] = port
		} else {
			ports[i] = port
			return ports, nil
		}
	}
	return ports, err
}
