// Package node is the agent: it puts the parts together and says what the node is.
//
//	session ──objects──▶ pods ──▶ runtime ──▶ network
//	   ▲                  │  └──▶ images, volumes ──▶ csi, probes
//	   └──── reports ─────┴── facts, proxy
//
// Goroutines: one for each part (see Run); what a part runs inside is its own affair.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/deviceplugin"
	"keelson.dev/keelson/agent/devices"
	"keelson.dev/keelson/agent/image"
	"keelson.dev/keelson/agent/oci"
	"keelson.dev/keelson/agent/pod"
	"keelson.dev/keelson/agent/podresources"
	"keelson.dev/keelson/agent/policy"
	"keelson.dev/keelson/agent/probe"
	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/agent/stream"
	"keelson.dev/keelson/agent/volume"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/lifecycle"
)

// Node is one agent.
type Node struct {
	cfg     Config
	facts   *facts
	session Session
	parts   []lifecycle.Part
	network agent.Network
	csi     *csi.Registry
	plugins *deviceplugin.Manager // nil on a fake node
	server  agent.NodeServer
	trouble *troubles
	room    *imageRoom // nil: the images are not the agent's own

	policyMetrics  func(context.Context, io.Writer) error // nil: none
	sessionMetrics func(io.Writer) error                  // nil: none
}

// New puts an agent together; nothing runs, and nothing on disk is touched, until Run.
func New(cfg Config) (*Node, error) {
	if err := cfg.Complete(); err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, network: noNetwork{}, trouble: newTroubles()}
	n.facts = newFacts(&n.cfg)
	n.session = cfg.Session
	var serve func(agent.NodeServer)
	trust := cfg.Trust
	if n.session == nil {
		s := session.New(session.Config{NodeName: cfg.NodeName, Servers: cfg.Servers, Token: cfg.Token,
			TokenFile: cfg.TokenFile, StateDir: filepath.Join(cfg.StateDir, "session"),
			RunDir:  filepath.Join(cfg.RunDir, "session"),
			Version: cmp.Or(cfg.Release, Version), BootID: n.facts.info.BootID, Facts: n.facts.node(), HTTPS: cfg.KubeletPort != 0, NodeIPs: cfg.NodeIPs,
			Log: cfg.Log.With("part", "session")})
		n.session, serve, trust, n.sessionMetrics = s, s.Serve, s, s.WriteMetrics
	}
	if cfg.Network != nil {
		n.network = cfg.Network(n.session)
	}
	n.part("session", n.session.Run)
	n.csi = csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(cfg.StateDir, "plugins"), Registration: cfg.PluginRegistration, Log: cfg.Log.With("part", "csi")})
	images := n.images()
	runtime, written := n.runtime(images)
	volumes, calls := cfg.Volumes, agent.DriverCalls(n.csi)
	var disk func(context.Context, types.UID, string) (agent.Disk, bool, error)
	fence := n.facts.fence
	var attached agent.AttachedVolumes
	if volumes == nil {
		own := volume.New(volume.Config{Fenced: fence.closed, Paths: cfg.paths(), Objects: n.session, CSI: n.csi, Allocatable: func() v1.ResourceList { return n.facts.node().Status.Allocatable }, Report: n.session.Event, Log: cfg.Log.With("part", "volumes")})
		volumes, calls, attached, disk = own, own, own, own.Disk
		n.own("volumes", own.Run)
		n.own("csi", func(ctx context.Context) error {
			if err := n.shareKubelet(); err != nil {
				return err
			}
			return n.csi.Run(ctx)
		})
		n.localVolumes()
	}
	if s, ok := n.session.(interface{ ServeDrivers(agent.DriverCalls) }); ok {
		s.ServeDrivers(calls)
	}
	dev, drivers, plugins := n.deviceParts()
	prober := cfg.Prober
	if prober == nil {
		prober = probe.New(probe.Config{Runtime: runtime, Log: cfg.Log.With("part", "probes")})
	}
	n.server = stream.New(runtime, n.session, cfg.LogDir)
	if serve != nil {
		serve(n.server)
	}
	pods := pod.New(pod.Config{NodeName: cfg.NodeName, BootID: n.facts.info.BootID,
		StartUnconfirmedPods: cfg.StartUnconfirmedPods, HostIPs: cfg.NodeIPs, Paths: cfg.paths(), Runtime: runtime, Images: images, Volumes: volumes, Devices: dev, Plugins: plugins, Objects: n.session, Reporter: n.session,
		Prober: prober, Policies: n.policies(runtime), Node: n.facts.admitting(n.session), Written: written, VolumeDisk: disk,
		ClusterDNS: clusterDNS(cfg.ClusterDNS, n.session), ResolvConf: cfg.ResolvConf, SeccompDefault: cfg.SeccompDefault,
		PodPIDs: cfg.PodPIDs, SingleProcessOOMKill: cfg.SingleProcessOOMKill, Ceiling: cfg.PodSecurity, Log: cfg.Log.With("part", "pods")})
	n.part("pods", pods.Run)
	if attached != nil {
		fence.wire(n.session, attached, pods.Fence, cfg.Log.With("part", "fence"))
		n.own("fence", fence.run)
	}
	var asked claimed
	if drivers != nil {
		asked = drivers
	}
	n.part("facts", func(ctx context.Context) error {
		return n.facts.run(ctx, watched{runtime: runtime, images: images, network: n.network, csi: n.csi, session: n.session,
			volumes: attached, plugins: n.plugins, devices: asked, trouble: n.trouble})
	})
	if rt, ok := runtime.(agent.TieredRuntime); ok {
		t := &tiers{runtime: rt, objects: n.session, limits: n.facts.limits}
		n.own("pod tiers", t.run)
	}
	n.evictions(runtime, pods)
	if rt, ok := runtime.(agent.MeasuredRuntime); ok {
		source := n.statistics(rt, pods)
		if to, ok := n.session.(agent.UsageReporter); ok {
			n.own("usage", func(ctx context.Context) error { return source.Tell(ctx, to.ReportUsage) })
		}
		if cfg.KubeletPort != 0 && trust != nil {
			n.own("kubelet API", n.kubelet(source, trust).Run)
		}
	}
	if cfg.Proxy != nil {
		n.own(partProxy, func(ctx context.Context) error { return cfg.Proxy.Run(ctx, n.session, n.session) })
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Extra)) {
		n.own(name, func(ctx context.Context) error { return cfg.Extra[name](ctx, n.session, n.session) })
	}
	if cfg.Network != nil {
		t := &tender{runtime: runtime, network: n.network, objects: n.session, reporter: n.session, node: cfg.NodeName,
			log: cfg.Log.With("part", "network"), failing: map[types.UID]string{}}
		n.own("pod networks", t.run)
	}
	return n, nil
}

// evictions keep what the node needs of its memory and its disk. A fake node has neither.
func (n *Node) evictions(runtime agent.Runtime, pods *pod.Set) {
	p := n.facts.pressure
	if p == nil {
		return
	}
	if rt, ok := runtime.(agent.MeasuredRuntime); ok {
		p.measure = rt.MeasureUsage
	}
	if n.room != nil {
		p.images, n.room.held = n.room, p.spares
	}
	p.pods, p.objects, p.reporter, p.log = pods, n.session, n.session, n.cfg.Log.With("part", "eviction")
	n.own("eviction", p.run)
}

// localVolumes has the node serve volumes on its own disk. The driver is found by its socket, as any other.
func (n *Node) localVolumes() {
	if !n.cfg.LocalVolumes {
		return
	}
	d := local.New(local.Config{Root: filepath.Join(n.cfg.StateDir, "local-volumes"), Limit: n.cfg.LocalVolumesLimit, KeepFree: n.cfg.DiskFloor,
		Socket: filepath.Join(n.cfg.StateDir, "plugins", local.DriverName, "csi.sock"), NodeID: n.cfg.NodeName,
		Listening: func() { n.csi.Scan(context.Background()) }, Log: n.cfg.Log.With("part", "local volumes")})
	n.own("local volumes", d.Run)
}

// deviceParts are what asks the drivers and the plugins of devices. A fake node has neither of its own.
func (n *Node) deviceParts() (dev agent.Devices, drivers *devices.Devices, plugins agent.Plugins) {
	cfg := &n.cfg
	if dev = cfg.Devices; dev == nil {
		drivers = devices.New(devices.Config{Registration: cfg.PluginRegistration, State: filepath.Join(cfg.StateDir, "devices"), Objects: n.session,
			Log: cfg.Log.With("part", "devices")})
		dev = drivers
		n.own("devices", drivers.Run)
	}
	if cfg.Runtime == nil {
		n.plugins = deviceplugin.New(deviceplugin.Config{Dir: cfg.DevicePlugins, Registration: cfg.PluginRegistration,
			State: filepath.Join(cfg.StateDir, "deviceplugins"), Objects: n.session, Log: cfg.Log.With("part", "device plugins")})
		plugins = n.plugins
		n.own("device plugins", n.plugins.Run)
	}
	if n.plugins != nil && drivers != nil && cfg.PodResources != "" {
		n.own("pod resources", podresources.New(podresources.Config{Socket: cfg.PodResources,
			Pods: n.session.Pods, Plugins: n.plugins, Claims: drivers}).Run)
	}
	return dev, drivers, plugins
}

// policies are what holds containers back until the policies of their pod are in force; nil where no network is ours.
func (n *Node) policies(runtime agent.Runtime) agent.PolicyGuard {
	foreign := n.cfg.foreignNetwork
	if foreign == nil || n.cfg.Network == nil {
		return nil
	}
	policies := policy.New(policy.Config{Objects: n.session, Sandboxes: runtime, Disabled: func() bool { return !n.cfg.NetworkPolicy || foreign() },
		Log: n.cfg.Log.With("part", "network policies")})
	n.policyMetrics = policies.WriteMetrics
	n.own(partPolicies, policies.Run)
	return policies
}

// The parts of which the node's conditions speak by name.
const (
	partRuntime = "runtime"
	partImages  = "images"
	partProxy   = "proxy"
	partRoutes  = "routes"
	partKey     = "wireguard key"
	partSenders = "source check"

	partPolicies = "network policies"
)

// Server answers exec, logs and port-forward for this node's pods. The agent's own session has it already;
// one that was passed in is to be given it.
func (n *Node) Server() agent.NodeServer { return n.server }

func (n *Node) part(name string, run func(context.Context) error) {
	n.parts = append(n.parts, lifecycle.Part{Name: name, Run: run})
}

// own adds a part whose failure is its own: the others go on, and the node's conditions tell.
func (n *Node) own(name string, run func(context.Context) error) {
	n.part(name, func(ctx context.Context) error { return supervise(ctx, name, run, n.trouble, n.cfg.Log) })
}

func (n *Node) images() agent.Images {
	if n.cfg.Images != nil {
		return n.cfg.Images
	}
	store := image.New(image.Config{Root: filepath.Join(n.cfg.StateDir, "images"), Run: filepath.Join(n.cfg.RunDir, "images"), Archives: n.cfg.ArchivesDir,
		Logger: n.cfg.Log.With("part", "images"), Insecure: n.cfg.InsecureRegistries,
		Mirrors: n.cfg.RegistryMirrors, Limits: image.Limits{Free: n.cfg.DiskFloor.Half()}, Floor: n.cfg.DiskFloor, Inodes: n.cfg.inodeFloor()})
	n.own(partImages, store.Run)
	n.room = &imageRoom{images: store, objects: n.session, reporter: n.session, node: n.cfg.NodeName, log: n.cfg.Log.With("part", "images"),
		soon: make(chan struct{}, 1)}
	n.own("image removal", n.room.run)
	return store
}

// runtime also returns what tells where a container writes; nil for a runtime that was passed in.
func (n *Node) runtime(images agent.Images) (rt agent.Runtime, written func(container string) (own, shared []string)) {
	if n.cfg.Runtime != nil {
		return n.cfg.Runtime, nil
	}
	bin := func(name string) string { return filepath.Join(n.cfg.RuntimeDir, name) }
	cfg := n.cfg.OCI()
	cfg.ShimPath, cfg.OCIPath, cfg.PausePath = bin("keelson-shim"), bin("keelson-oci"), bin("keelson-pause")
	cfg.Handlers, cfg.Images, cfg.Network, cfg.Logger = n.cfg.RuntimeHandlers, images, n.network, n.cfg.Log.With("part", "runtime")
	r := oci.New(cfg)
	n.own(partRuntime, r.Run)
	return r, r.Written
}

// Run is the agent's life: until ctx ends, or the session or the pods' workers cannot go on. Containers keep running
// after it returned.
func (n *Node) Run(ctx context.Context) error {
	if n.cfg.Runtime == nil {
		if err := n.check(); err != nil {
			return err
		}
		// before the first driver's pod; the part that looks for drivers tells what is wrong and tries again
		_ = n.shareKubelet()
	}
	if f := n.facts.fence; f != nil {
		if err := f.begin(); err != nil {
			return err
		}
		if f.unconfirmed() != "" {
			n.session.Facts(n.facts.again())
		}
	}
	n.cfg.Log.Info("agent starts", "node", n.cfg.NodeName, "addresses", n.cfg.NodeIPs, "version", Version, "release", n.cfg.Release)
	return lifecycle.Run(ctx, n.parts...)
}

// shareKubelet prepares the folders of third-party CSI drivers, where the node has them.
func (n *Node) shareKubelet() error {
	if n.cfg.KubeletDir == "" {
		return nil
	}
	return volume.Share(n.cfg.KubeletDir)
}

// check says in one line what a node lacks, before anything is half made.
func (n *Node) check() error {
	if os.Geteuid() != 0 {
		return errors.New("the agent has to run as root: it makes namespaces, mounts and cgroups")
	}
	if total := n.cfg.memoryOfNode(); total > 0 {
		if err := n.cfg.checkMemoryFloor(total); err != nil {
			return err
		}
	}
	if total, _, err := disk(n.cfg.StateDir); err == nil {
		if err := n.cfg.checkDiskFloor(total); err != nil {
			return err
		}
	}
	if total, _, err := inodes(n.cfg.StateDir); err == nil && total > 0 {
		if err := n.cfg.checkInodeFloor(total); err != nil {
			return err
		}
	}
	for _, name := range []string{"keelson-shim", "keelson-oci", "keelson-pause"} {
		if _, err := os.Stat(filepath.Join(n.cfg.RuntimeDir, name)); err != nil {
			return fmt.Errorf("%s is missing in %s: give its folder with --runtime-dir", name, n.cfg.RuntimeDir)
		}
	}
	for dir, mode := range map[string]os.FileMode{n.cfg.StateDir: 0o711, n.cfg.RunDir: 0o711, n.cfg.LogDir: 0o755} {
		if err := os.MkdirAll(dir, mode); err != nil {
			return fmt.Errorf("making the agent's folders: %w", err)
		}
	}
	return nil
}

// noNetwork is what a node without a pod network has.
type noNetwork struct{}

var errNoNetwork = errors.New("this agent has no pod network")

func (noNetwork) Add(context.Context, agent.NetworkRequest) (agent.NetworkStatus, error) {
	return agent.NetworkStatus{}, errNoNetwork
}
func (noNetwork) Check(context.Context, agent.NetworkRequest) error { return errNoNetwork }
func (noNetwork) Del(context.Context, agent.NetworkRequest) error   { return nil }
func (noNetwork) GC(context.Context, []string) error                { return nil }
func (noNetwork) Ready() error                                      { return errNoNetwork }
