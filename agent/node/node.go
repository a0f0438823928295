// Package node is the agent: it wires the parts together and reports the Node object.
//
//	session ──objects──▶ pods ──▶ runtime ──▶ network
//	   ▲                  │  └──▶ images, volumes ──▶ csi, probes
//	   └──── reports ─────┴── facts, proxy
//
// Each part runs in a goroutine (see Run) and starts its own goroutines.
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
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/podresources"
	"keelson.dev/keelson/agent/policy"
	"keelson.dev/keelson/agent/probe"
	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/agent/stream"
	"keelson.dev/keelson/agent/volume"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/lifecycle"
	"keelson.dev/keelson/internal/wakeup"
)

// Node is a node agent with all its parts.
type Node struct {
	cfg      Config
	facts    *nodeFacts
	session  Session
	parts    []lifecycle.Part
	network  agent.Network
	csi      *csi.Registry
	plugins  *deviceplugin.Manager // nil on a fake node
	server   agent.NodeServer
	failures *partFailures
	imageGC  *imageGC // nil: an external runtime owns the images

	policyMetrics  func(context.Context, io.Writer) error // nil: no metrics
	sessionMetrics func(io.Writer) error                  // nil: no metrics
	probeMetrics   func(io.Writer) error                  // nil: no metrics
}

// New assembles an agent from its configuration. It starts nothing and does not access the disk;
// Run does.
func New(cfg Config) (*Node, error) {
	if err := cfg.Complete(); err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, network: noNetwork{}, failures: newPartFailures()}
	n.facts = newNodeFacts(&n.cfg)
	serve, trust := n.openSession()
	if cfg.PodNetwork.New != nil {
		n.network = cfg.PodNetwork.New(n.session)
	}
	n.addPart("session", n.session.Run)
	n.csi = csi.NewRegistry(csi.RegistryConfig{Plugins: filepath.Join(cfg.Dirs.State, "plugins"),
		Registration: cfg.Dirs.PluginRegistration, Log: cfg.Log.With("part", "csi")})
	images := n.addImages()
	runtime, written := n.addRuntime(images)
	volumes, calls := cfg.Parts.Volumes, agent.DriverCalls(n.csi)
	var disk func(context.Context, types.UID, string) (agent.Disk, bool, error)
	fence := n.facts.fence
	var attached agent.AttachedVolumes
	if volumes == nil {
		own := volume.New(volume.Config{Fenced: fence.isFenced, Paths: cfg.agentPaths(), Objects: n.session, CSI: n.csi,
			Allocatable: func() v1.ResourceList {
				return n.facts.currentNode().Status.Allocatable
			}, Report: n.session.Event, Log: cfg.Log.With("part", "volumes")})
		volumes, calls, attached, disk = own, own, own, own.Disk
		n.addSupervised("volumes", own.Run)
		n.addSupervised("csi", func(ctx context.Context) error {
			if err := n.shareKubelet(); err != nil {
				return err
			}
			return n.csi.Run(ctx)
		})
		n.addLocalVolumes()
	}
	if s, ok := n.session.(interface{ ServeDrivers(agent.DriverCalls) }); ok {
		s.ServeDrivers(calls)
	}
	dev, drivers, plugins := n.addDevices()
	prober := cfg.Parts.Prober
	if prober == nil {
		own := probe.New(probe.Config{Runtime: runtime, Pods: n.session.Pods, Log: cfg.Log.With("part", "probes")})
		prober, n.probeMetrics = own, own.WriteMetrics
	}
	n.server = stream.New(runtime, n.session, cfg.Dirs.Logs)
	if serve != nil {
		serve(n.server)
	}
	pods := pod.New(pod.Config{
		Identity: pod.Identity{NodeName: cfg.NodeName, BootID: n.facts.info.BootID, HostIPs: cfg.NodeIPs},
		Deps: pod.Dependencies{Runtime: runtime, Images: images, Volumes: volumes, Devices: dev, Plugins: plugins,
			Objects:  n.session,
			Reporter: n.session, Prober: prober, Policies: n.addPolicies(runtime)},
		Containers: criconfig.Config{ClusterDNS: clusterDNS(cfg.Pods.ClusterDNS, n.session),
			ResolvConf:     cfg.Pods.ResolvConf,
			SeccompDefault: cfg.Pods.SeccompDefault, PodPIDs: cfg.Pods.PIDs,
			SingleProcessOOMKill: cfg.Pods.SingleProcessOOMKill},
		Paths: cfg.agentPaths(), Node: n.facts.admissionNodeFunc(n.session), WrittenDirs: written, VolumeDisk: disk,
		StartUnconfirmedPods: cfg.Pods.StartUnconfirmed, Ceiling: cfg.Pods.Security, Log: cfg.Log.With("part", "pods")})
	n.addPart("pods", pods.Run)
	if attached != nil {
		fence.setDependencies(n.session, attached, pods.FencePod, cfg.Log.With("part", "fence"))
		n.addSupervised("fence", fence.runFence)
	}
	var asked draDrivers
	if drivers != nil {
		asked = drivers
	}
	n.addPart("facts", func(ctx context.Context) error {
		return n.facts.updateFacts(ctx, factSources{runtime: runtime, images: images, network: n.network, csi: n.csi,
			session: n.session,
			volumes: attached, plugins: n.plugins, devices: asked, failures: n.failures})
	})
	if rt, ok := runtime.(agent.TieredRuntime); ok {
		t := &tierUpdater{runtime: rt, objects: n.session, limits: n.facts.podLimits}
		n.addSupervised("pod tiers", t.updateTiers)
	}
	n.addEviction(runtime, pods)
	n.addUsageReports(runtime, pods, trust)
	if cfg.Services.Proxy != nil {
		n.addSupervised(partProxy, func(ctx context.Context) error {
			return cfg.Services.Proxy.Run(ctx, n.session, n.session)
		})
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Parts.Extra)) {
		n.addSupervised(name, func(ctx context.Context) error {
			return cfg.Parts.Extra[name](ctx, n.session, n.session)
		})
	}
	if cfg.PodNetwork.New != nil {
		t := &networkChecker{runtime: runtime, network: n.network, objects: n.session, reporter: n.session,
			node: cfg.NodeName,
			log:  cfg.Log.With("part", "network"), reported: map[types.UID]string{}}
		n.addSupervised("pod networks", t.checkPodNetworks)
	}
	return n, nil
}

// openSession sets n.session to the configured session or to a new session. The caller passes the
// server for exec, logs and port-forward to serve, which is nil for a configured session. trust
// authenticates the clients of the node's HTTPS server. If trust is nil, that server is not
// started.
func (n *Node) openSession() (serve func(agent.NodeServer), trust agent.ServerTrust) {
	cfg := &n.cfg
	if n.session = cfg.Parts.Session; n.session != nil {
		return nil, cfg.Parts.Trust
	}
	s := session.New(session.Config{NodeName: cfg.NodeName,
		Join:     session.Join{Servers: cfg.Join.Servers, Token: cfg.Join.Token, TokenFile: cfg.Join.TokenFile},
		StateDir: filepath.Join(cfg.Dirs.State, "session"),
		RunDir:   filepath.Join(cfg.Dirs.Run, "session"),
		Version:  cmp.Or(cfg.Release, Version), BootID: n.facts.info.BootID, Facts: n.facts.currentNode(),
		HTTPS: cfg.Listen.KubeletPort != 0, NodeIPs: cfg.NodeIPs,
		Log: cfg.Log.With("part", "session")})
	n.session, serve, trust, n.sessionMetrics = s, s.Serve, s, s.WriteMetrics
	return serve, trust
}

// addUsageReports adds the reports of resource usage and the node's HTTPS server, if the runtime
// measures its containers.
func (n *Node) addUsageReports(runtime agent.Runtime, pods *pod.Set, trust agent.ServerTrust) {
	cfg := &n.cfg
	if rt, ok := runtime.(agent.MeasuredRuntime); ok {
		source := n.newStatistics(rt, pods)
		if to, ok := n.session.(agent.UsageReporter); ok {
			n.addSupervised("usage", func(ctx context.Context) error { return source.ReportUsage(ctx, to.ReportUsage) })
		}
		if cfg.Listen.KubeletPort != 0 && trust != nil {
			n.addSupervised("kubelet API", n.newKubeletServer(source, trust).Run)
		}
	}
}

// addEviction adds the part of the agent that evicts pods under memory and disk pressure. On a fake
// node it adds nothing.
func (n *Node) addEviction(runtime agent.Runtime, pods *pod.Set) {
	p := n.facts.pressure
	if p == nil {
		return
	}
	if rt, ok := runtime.(agent.MeasuredRuntime); ok {
		p.usage.measure = rt.MeasureUsage
	}
	if n.imageGC != nil {
		p.disk.images, n.imageGC.isHeld = n.imageGC, p.disk.isSparing
	}
	p.pods, p.objects, p.events.reporter, p.log = pods, n.session, n.session, n.cfg.Log.With("part", "eviction")
	n.addSupervised("eviction", p.monitorPressure)
}

// addLocalVolumes adds the CSI driver for volumes on the node's own disk. The CSI registry finds it
// by its socket, like any other driver.
func (n *Node) addLocalVolumes() {
	if !n.cfg.Storage.LocalVolumes {
		return
	}
	d := local.New(local.Config{Root: filepath.Join(n.cfg.Dirs.State, "local-volumes"),
		Limit:    n.cfg.Storage.LocalVolumesLimit,
		KeepFree: n.cfg.Node.DiskFloor,
		Socket:   filepath.Join(n.cfg.Dirs.State, "plugins", local.DriverName, "csi.sock"), NodeID: n.cfg.NodeName,
		Listening: func() { n.csi.Scan(context.Background()) }, Log: n.cfg.Log.With("part", "local volumes")})
	n.addSupervised("local volumes", d.Run)
}

// addDevices adds the support for DRA drivers and device plugins. On a fake node it adds nothing.
func (n *Node) addDevices() (dev agent.Devices, drivers *devices.Devices, plugins agent.Plugins) {
	cfg := &n.cfg
	if dev = cfg.Parts.Devices; dev == nil {
		drivers = devices.New(devices.Config{Registration: cfg.Dirs.PluginRegistration,
			State: filepath.Join(cfg.Dirs.State, "devices"), Objects: n.session,
			Log: cfg.Log.With("part", "devices")})
		dev = drivers
		n.addSupervised("devices", drivers.Run)
	}
	if cfg.Parts.Runtime == nil {
		n.plugins = deviceplugin.New(deviceplugin.Config{Dir: cfg.Dirs.DevicePlugins,
			Registration: cfg.Dirs.PluginRegistration,
			State:        filepath.Join(cfg.Dirs.State, "deviceplugins"), Objects: n.session,
			Log: cfg.Log.With("part", "device plugins")})
		plugins = n.plugins
		n.addSupervised("device plugins", n.plugins.Run)
	}
	if n.plugins != nil && drivers != nil && cfg.Dirs.PodResources != "" {
		n.addSupervised("pod resources", podresources.New(podresources.Config{Socket: cfg.Dirs.PodResources,
			Pods: n.session.Pods, Plugins: n.plugins, Claims: drivers}).Run)
	}
	return dev, drivers, plugins
}

// addPolicies adds the enforcement of network policies. It returns the guard that delays the start
// of containers until the policies of their pod are applied. It returns nil if the agent has no pod
// network.
func (n *Node) addPolicies(runtime agent.Runtime) agent.PolicyGuard {
	foreign := n.cfg.PodNetwork.isForeign
	if foreign == nil || n.cfg.PodNetwork.New == nil {
		return nil
	}
	policies := policy.New(policy.Config{Objects: n.session, Sandboxes: runtime, Disabled: func() bool {
		return !n.cfg.PodNetwork.Policies || foreign()
	},
		Log: n.cfg.Log.With("part", "network policies")})
	n.policyMetrics = policies.WriteMetrics
	n.addSupervised(partPolicies, policies.Run)
	return policies
}

// Names of parts of the agent to which the conditions of the Node refer.
const (
	partRuntime = "runtime"
	partImages  = "images"
	partProxy   = "proxy"
	partRoutes  = "routes"
	partKey     = "wireguard key"
	partSenders = "source check"

	partPolicies = "network policies"
)

// Server returns the server for exec, logs and port-forward of this node's pods. The agent's own
// session uses it already. It must be passed to a session that was set in Config.
func (n *Node) Server() agent.NodeServer { return n.server }

func (n *Node) addPart(name string, run func(context.Context) error) {
	n.parts = append(n.parts, lifecycle.Part{Name: name, Run: run})
}

// addSupervised adds a part of the agent. If the part's function run returns, Node.Run calls it
// again, while the other parts continue. The conditions of the Node report the failure.
func (n *Node) addSupervised(name string, run func(context.Context) error) {
	n.addPart(name, func(ctx context.Context) error { return supervisePart(ctx, name, run, n.failures, n.cfg.Log) })
}

func (n *Node) addImages() agent.Images {
	if n.cfg.Parts.Images != nil {
		return n.cfg.Parts.Images
	}
	store := image.New(image.Config{Root: filepath.Join(n.cfg.Dirs.State, "images"),
		Run: filepath.Join(n.cfg.Dirs.Run, "images"), Archives: n.cfg.Dirs.Archives,
		Logger: n.cfg.Log.With("part", "images"), Insecure: n.cfg.Registries.Insecure,
		Mirrors: n.cfg.Registries.Mirrors, Limits: image.Limits{Free: n.cfg.Node.DiskFloor.Half()},
		Floor:  n.cfg.Node.DiskFloor,
		Inodes: n.cfg.inodeFloor()})
	n.addSupervised(partImages, store.Run)
	n.imageGC = &imageGC{images: store, objects: n.session, reporter: n.session, node: n.cfg.NodeName,
		log:       n.cfg.Log.With("part", "images"),
		requested: wakeup.New()}
	n.addSupervised("image removal", n.imageGC.runCollections)
	return store
}

// addRuntime returns the container runtime. It adds the runtime as a part of the agent unless
// Config contains a runtime. written returns the paths on the node's disk to which a container
// writes. It is nil for a runtime from Config.
func (n *Node) addRuntime(images agent.Images) (
	rt agent.Runtime, written func(container string) (own, shared []string),
) {
	if n.cfg.Parts.Runtime != nil {
		return n.cfg.Parts.Runtime, nil
	}
	bin := func(name string) string { return filepath.Join(n.cfg.Dirs.Runtime, name) }
	cfg := n.cfg.OCI()
	cfg.ShimPath, cfg.OCIPath, cfg.PausePath = bin("keelson-shim"), bin("keelson-oci"), bin("keelson-pause")
	cfg.Handlers, cfg.Images, cfg.Network, cfg.Logger = n.cfg.Pods.RuntimeHandlers, images, n.network,
		n.cfg.Log.With("part", "runtime")
	r := oci.New(cfg)
	n.addSupervised(partRuntime, r.Run)
	return r, r.WrittenDirs
}

// Run runs all parts of the agent until ctx ends, or until the session or the pod workers fail
// permanently. Containers continue to run after it returns.
func (n *Node) Run(ctx context.Context) error {
	if n.cfg.Parts.Runtime == nil {
		if err := n.checkMachine(); err != nil {
			return err
		}
		// Needed before the first driver's pod. Errors are ignored here: part csi reports them and
		// retries.
		_ = n.shareKubelet()
	}
	if f := n.facts.fence; f != nil {
		if err := f.startReport(); err != nil {
			return err
		}
		if f.unconfirmedReport() != "" {
			n.session.Facts(n.facts.recompose())
		}
	}
	n.cfg.Log.Info("agent starts", "node", n.cfg.NodeName, "addresses", n.cfg.NodeIPs, "version", Version,
		"release", n.cfg.Release)
	return lifecycle.Run(ctx, n.parts...)
}

// shareKubelet prepares the folders for third-party CSI drivers below Config.Dirs.Kubelet. It does
// nothing if that is not set.
func (n *Node) shareKubelet() error {
	if n.cfg.Dirs.Kubelet == "" {
		return nil
	}
	return volume.ShareKubeletMounts(n.cfg.Dirs.Kubelet)
}

// checkMachine returns an error if the machine lacks a requirement of the agent. Otherwise it
// creates the agent's folders.
func (n *Node) checkMachine() error {
	if os.Geteuid() != 0 {
		return errors.New("the agent must run as root: it creates namespaces, mounts and cgroups")
	}
	if total := n.cfg.memoryOfNode(); total > 0 {
		if err := n.cfg.checkMemoryFloor(total); err != nil {
			return err
		}
	}
	if total, _, err := diskSpace(n.cfg.Dirs.State); err == nil {
		if err := n.cfg.checkDiskFloor(total); err != nil {
			return err
		}
	}
	if total, _, err := diskInodes(n.cfg.Dirs.State); err == nil && total > 0 {
		if err := n.cfg.checkInodeFloor(total); err != nil {
			return err
		}
	}
	for _, name := range []string{"keelson-shim", "keelson-oci", "keelson-pause"} {
		if _, err := os.Stat(filepath.Join(n.cfg.Dirs.Runtime, name)); err != nil {
			return fmt.Errorf("%s is missing in %s: set its folder with --runtime-dir", name, n.cfg.Dirs.Runtime)
		}
	}
	for dir, mode := range map[string]os.FileMode{n.cfg.Dirs.State: 0o711, n.cfg.Dirs.Run: 0o711,
		n.cfg.Dirs.Logs: 0o755} {
		if err := os.MkdirAll(dir, mode); err != nil {
			return fmt.Errorf("creating the agent's folders: %w", err)
		}
	}
	return nil
}

// noNetwork is the agent.Network of a node without a pod network: only pods with hostNetwork run.
type noNetwork struct{}

var errNoNetwork = errors.New("this agent has no pod network")

func (noNetwork) Add(context.Context, agent.NetworkRequest) (agent.NetworkStatus, error) {
	return agent.NetworkStatus{}, errNoNetwork
}
func (noNetwork) Check(context.Context, agent.NetworkRequest) error { return errNoNetwork }
func (noNetwork) Del(context.Context, agent.NetworkRequest) error   { return nil }
func (noNetwork) GC(context.Context, []string) error                { return nil }
func (noNetwork) Ready() error                                      { return errNoNetwork }
