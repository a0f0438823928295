// Package loopback runs a control plane in this process or in child processes. It has real replicas
// with real stores, each on its own loopback address.
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

// Shape is the configuration of a control plane that Start creates.
type Shape struct {
	Name      string
	Replicas  int
	Heartbeat time.Duration // of the nodes; 0 = default
	Store     datadir.StoreOptions
	Run       func(context.Context, server.Config) error // runs a replica; nil = in this process
	Ready     time.Duration                              // time limit for each replica to become ready

	ClusterCIDR, ServiceCIDR string // "" = default, enough for 256 nodes
	NodeTokenUses            int    // 0 = default
}

// Plane is a running control plane.
type Plane struct {
	Founded server.InitResult
	Fleet   string         // the first replica's address for agents
	Configs []*rest.Config // of each replica's API, without rate limit

	shape    Shape
	api      int // api and fleet are ports
	fleet    int
	replicas []server.Config

	end   context.CancelFunc
	parts sync.WaitGroup
	mu    sync.Mutex
	err   error
}

// Start creates a control plane in a folder and returns when every replica is ready.
func Start(ctx context.Context, dir string, s Shape) (*Plane, error) {
	if s.Run == nil {
		s.Run = server.Run
	}
	ctx, cancel := context.WithCancel(ctx)
	p := &Plane{shape: s, end: cancel}
	if err := p.startReplicas(ctx, dir, s); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

// Stop stops all replicas. It may be called again. It returns the errors of replicas that exited by
// themselves.
func (p *Plane) Stop() error {
	p.end()
	p.parts.Wait()
	return p.err
}

func (p *Plane) startReplicas(ctx context.Context, dir string, s Shape) error {
	ports, err := freePorts(s.Replicas)
	if err != nil {
		return fmt.Errorf("find free ports: %w", err)
	}
	cluster := datadir.Cluster{Name: s.Name, ClusterCIDR: s.ClusterCIDR, ServiceCIDR: s.ServiceCIDR,
		APIPort: ports[0], FleetPort: ports[1], PeerPort: ports[2]}
	p.api, p.fleet = cluster.APIPort, cluster.FleetPort
	p.Fleet = p.FleetAddress(0)
	for n := 1; n <= s.Replicas; n++ {
		name := fmt.Sprintf("cp%d", n)
		cfg := server.Config{
			Name: name, DataDir: filepath.Join(dir, name), Advertise: replicaIP(n), Store: s.Store,
			Timing:  server.TimingConfig{AgentHeartbeat: s.Heartbeat},
			Process: server.ProcessConfig{Version: "test", Log: slog.New(slog.DiscardHandler)},
		}
		if n == 1 {
			p.Founded, err = server.Init(cfg, cluster,
				server.InitOptions{NodeTokenUses: s.NodeTokenUses, ReplicaTokenUses: max(1, s.Replicas-1)})
		} else {
			err = server.Join(ctx, cfg, p.Founded.ControlPlaneToken, []string{p.Fleet})
		}
		if err != nil {
			return fmt.Errorf("making replica %s: %w", name, err)
		}
		p.replicas = append(p.replicas, cfg)
		p.runReplica(ctx, cfg)
		if err := p.awaitReplica(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// runReplica runs a replica until ctx ends, and restarts it if it fails.
func (p *Plane) runReplica(ctx context.Context, cfg server.Config) {
	p.parts.Go(func() {
		if err := wait.For(ctx, 100*time.Millisecond, func() error { return p.shape.Run(ctx, cfg) }); err != nil &&
			ctx.Err() == nil {
			p.addError(fmt.Errorf("replica %s ended: %w", cfg.Name, err))
		}
	})
}

// Restart starts the replicas that were stopped by Stop, after change has changed their
// configurations. It returns when every replica is ready.
func (p *Plane) Restart(ctx context.Context, change func(*server.Config)) error {
	ctx, p.end = context.WithCancel(ctx)
	p.Configs = nil
	for i := range p.replicas {
		change(&p.replicas[i])
		p.runReplica(ctx, p.replicas[i])
	}
	for n := 1; n <= len(p.replicas); n++ {
		if err := p.awaitReplica(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

func (p *Plane) addError(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = errors.Join(p.err, err)
}

// awaitReplica waits until replica n, counted from 1, is ready. It adds the replica's client
// configuration to Configs.
func (p *Plane) awaitReplica(ctx context.Context, n int) error {
	host := p.portAddress(n-1, p.api)
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

// portAddress returns the address of a port of replica i, counted from 0.
func (p *Plane) portAddress(i, port int) string {
	return net.JoinHostPort(replicaIP(i+1), strconv.Itoa(port))
}

// replicaIP returns the loopback address of replica n, counted from 1.
func replicaIP(n int) string { return fmt.Sprintf("127.0.0.%d", n) }

// Ports are chosen from this range. The kernel does not use it for outgoing connections, so the
// ports are still free when a replica is restarted.
const firstPort, lastPort = 18000, 31000

// freePorts returns three ports that are free on the addresses of all replicas.
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
			if l, err = net.Listen("tcp", net.JoinHostPort(replicaIP(n), strconv.Itoa(port))); err == nil {
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
