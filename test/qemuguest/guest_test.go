// needs: qemu and a kernel of Debian's, which scripts/setup guest brings.

package qemuguest

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/test/qemuguest/plan"
)

// Of the whole guest. On two quiet cores it takes some three minutes, beside much else several times that.
const limit = 30 * time.Minute

// ociTests are those of agent/oci that look different on cgroup v2 or to a process that has every capability. All of the
// others pass there too, but for the measured one: qemu is ten to twenty times slower than the machine that it runs on.
var ociTests = flag.String("guest.oci",
	"^Test(ContainerFromCreateToExit|Resources|OutOfMemory|OOMScores|OtherDevices|UnifiedHierarchy|BestEffortComesLast|"+
		"ForkBomb|ShimKilled|SecurityContext|AppArmor|Measure|LimitsChangeInPlace|LimitsComeAndGo|MemoryInUseIsNotTaken)$",
	"tests of agent/oci to run in the guest")

// networkTests are those of agent/network that need WireGuard, which the machine that runs the tests may not have.
var networkTests = flag.String("guest.network", "^Test(KernelWithoutWireGuard|Encrypted.*)$",
	"tests of agent/network to run in the guest")

// localTests are those of the driver for the nodes' disks that grow mounted file systems, which takes CAP_SYS_RESOURCE, those
// that need project quotas, and one for which newer kernels are too patient.
var localTests = flag.String("guest.local",
	"^Test(VolumesGrow|BlockDevice|SizeIsKeptTo|AllocatedThroughSignals|ProjectQuotas|QuotasGone|SanityOfQuotas)$",
	"tests of csi/local to run in the guest")

// volumeTests are those of agent/volume that need a kernel which serves NFS, or is an iSCSI target in the machine's first
// network namespace.
var volumeTests = flag.String("guest.volume",
	"^Test(FoldersOfAServer|ServersThat.*|ServersOfVersionThree|DisksOfATarget|DisksThatAre.*|DisksAs.*|TargetsThat.*|"+
		"InitiatorsAndPortals|SessionsOfOthers|AgentsThatAreKilled|PortalsThat.*)$",
	"tests of agent/volume to run in the guest")

// diskTests selects the tests of test/qemuguest/inside with pods that use iSCSI disks, in which the
// machine itself is the cluster. The guest with the lab skips them.
var diskTests = flag.String("guest.disks", "^TestPodsWithDisks$",
	"tests of test/qemuguest/inside to run where pods have iSCSI disks")

var insideTests = flag.String("guest.inside", ".", "tests of test/qemuguest/inside to run in the guest")

// daemonFolder returns the folder of the daemons.
func daemonFolder() string {
	if dir := os.Getenv("KEELSON_BIN"); dir != "" {
		return dir
	}
	return filepath.Join("..", "..", "bin")
}

// requireGuest returns the path of qemu and a kernel. It skips the test if the machine cannot have
// them, and fails the test otherwise.
func requireGuest(t *testing.T) (qemu string, k *kernel) {
	t.Helper()
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err == nil {
		k, err = openKernel(filepath.Join("..", "..", "bin", "guest"))
	}
	if err == nil {
		return qemu, k
	}
	if _, apt := exec.LookPath("apt-get"); apt == nil && os.Geteuid() == 0 {
		t.Fatalf("qemu and a kernel for the guest are missing: run scripts/setup guest: %v", err)
	}
	t.Skipf("needs: qemu-system-x86_64 and a kernel in bin/guest, which scripts/setup guest installs as root from "+
		"Debian's packages: %v", err)
	return "", nil
}

// buildStatic builds a static program, or a static test binary of a package.
func buildStatic(t *testing.T, out string, args ...string) {
	t.Helper()
	cmd := exec.Command("go", append([]string{args[0]},
		append([]string{"-trimpath", "-ldflags=-s -w", "-o", out}, args[1:]...)...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, text)
	}
}

// modules are the kernel modules that the runtime, the pod network and the Service rules need. In
// the guest they are not loaded on demand.
var modules = []string{"overlay", "veth", "bridge", "br_netfilter", "nf_tables", "nf_conntrack_netlink",
	"nft_chain_nat", "nft_nat", "nft_masq", "nft_ct",
	"nft_numgen", "nft_objref", "nft_reject_ipv4", "nft_reject_inet", "nft_fib_inet", "nft_redir", "nft_limit",
	"nft_hash", "nft_meta_bridge", "wireguard", "loop", "ext4",
	"quota_v2", "xfs", "nfsv3", "nfsv4", "nfsd", "sd_mod", "iscsi_tcp", "target_core_file", "iscsi_target_mod"}

// tools are programs of the host that go into the guest, with their libraries.
var tools = []string{"nft", "nsenter", "unshare", "mount", "umount", "hostname", "mkfs.ext4", "mkfs.xfs", "e2fsck",
	"resize2fs", "blkid", "fsck.ext4"}

// users of the machine: clients of iscsid need a user name, and rpcbind and rpc.statd run as their
// users.
const users = "root:x:0:0::/:/bin/sh\n_rpc:x:106:65534::/run/rpcbind:/bin/false\nstatd:x:107:65534::/var/lib/nfs:/bin/false\n"

// fileTools are the programs of an NFS version 3 server. If they are missing, its test is skipped.
var fileTools = []string{"rpcbind", "rpc.mountd", "rpc.statd", "exportfs", "mount.nfs"}

// diskTools are the programs of an iSCSI initiator. If they are missing, its tests are skipped.
var diskTools = []string{"iscsid", "iscsiadm"}

// diskSettings returns environment variables for tests in the guest. They state whether its kernel
// can be an iSCSI target and whether an initiator is installed, so that the tests that need both
// are not skipped.
func (m *machine) diskSettings(t *testing.T) []string {
	t.Helper()
	for _, module := range []string{"iscsi_target_mod", "target_core_file", "iscsi_tcp"} {
		if m.kernel.modules[module] == "" {
			t.Logf("the kernel of the guest has no %s", module)
			return nil
		}
	}
	for _, tool := range diskTools {
		if err := m.addTool(tool); err != nil {
			t.Log(err)
			return nil
		}
	}
	return []string{"KEELSON_NEEDS_ISCSI=1"}
}

// addFileTools adds fileTools and the file netconfig, which their library reads.
func (m *machine) addFileTools(t *testing.T) {
	t.Helper()
	networks := filepath.Join(m.kernel.root, "etc/netconfig")
	if _, err := os.Stat(networks); err != nil {
		networks = "/etc/netconfig"
	}
	m.files["/etc/netconfig"] = networks
	for _, tool := range fileTools {
		if err := m.addTool(tool); err != nil {
			t.Log(err)
			delete(m.files, "/etc/netconfig")
			return
		}
	}
}

// fileSettings returns environment variables for tests in the guest. They state whether its kernel
// can serve NFS, so that the tests that need it are not skipped.
func (k *kernel) fileSettings() []string {
	if k.modules["nfsd"] == "" || k.modules["nfsv4"] == "" {
		return nil
	}
	return []string{"KEELSON_NEEDS_NFS=1"}
}

// guest is a machine with programs that run in it, one after the other.
type guest struct {
	binaries map[string][]string // programs built by go
	daemons  bool                // it has those of the cluster
	lacks    []string            // but for these of their folder
	programs func(m *machine, t *testing.T) []plan.Program
}

// Two machines side by side: volumes wait for servers that do not answer most of the time.
var guests = map[string]guest{
	"cluster": {daemons: true,
		binaries: map[string][]string{
			"/guest/oci.test":     {"test", "-c", "../../agent/oci"},
			"/guest/network.test": {"test", "-c", "../../agent/network"},
			"/guest/local.test":   {"test", "-c", "../../csi/local"},
			"/guest/inside.test":  {"test", "-c", "-tags=guest", "./inside"},
		},
		programs: func(m *machine, _ *testing.T) []plan.Program {
			return []plan.Program{
				{Name: "network", Args: []string{"/guest/network.test", "-test.v", "-test.timeout=470s", "-test.run",
					*networkTests}, Seconds: 480,
					Env: []string{"KEELSON_CNI_BIN=/opt/keelson/cni", "KEELSON_NEEDS_WIREGUARD=1"}},
				{Name: "local volumes", Args: []string{"/guest/local.test", "-test.v", "-test.run", *localTests},
					Seconds: 360, Env: []string{"KEELSON_NEEDS_QUOTAS=1"}},
				{Name: "inside", Args: []string{"/guest/inside.test", "-test.v", "-test.run", *insideTests},
					Seconds: 1080, Env: m.kernel.fileSettings()},
				{Name: "oci", Args: []string{"/guest/oci.test", "-test.v", "-test.run", *ociTests},
					Env: []string{"KEELSON_OCI_BIN=/opt/keelson"}, Seconds: 720},
			}
		}},
	"volumes": {daemons: true, lacks: []string{"keelson-csi-local", "keelson-entry", "images/entry.tar"},
		binaries: map[string][]string{
			"/guest/volume.test": {"test", "-c", "../../agent/volume"},
			"/guest/inside.test": {"test", "-c", "-tags=guest", "./inside"},
		},
		programs: func(m *machine, t *testing.T) []plan.Program {
			iscsi := m.diskSettings(t)
			return []plan.Program{
				{Name: "volumes", Args: []string{"/guest/volume.test", "-test.v", "-test.run", *volumeTests},
					Seconds: 960, Env: append(m.kernel.fileSettings(), iscsi...)},
				{Name: "disks", Args: []string{"/guest/inside.test", "-test.v", "-test.run", *diskTests},
					Seconds: 960, Env: iscsi},
			}
		}},
}

func TestGuest(t *testing.T) {
	var failures failureList
	// The guests run in parallel: the failures of the guest that ends first are logged again after those of the other.
	t.Cleanup(func() {
		for _, failure := range failures.list() {
			t.Log(failure)
		}
	})
	for name, g := range guests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g.runTests(t, &failures)
		})
	}
}

// failureList collects the failures of guests that run in parallel.
type failureList struct {
	mu       sync.Mutex
	failures []string
}

// report fails the test of a guest and adds the failure to the list.
func (l *failureList) report(t *testing.T, failure string) {
	t.Helper()
	t.Error(failure)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures = append(l.failures, t.Name()+": "+failure)
}

func (l *failureList) list() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.failures)
}

// runTests boots the guest, runs its programs and reports their failures.
func (g guest) runTests(t *testing.T, failures *failureList) {
	qemu, k := requireGuest(t)
	dir := t.TempDir()
	m := &machine{kernel: k, dir: dir, modules: modules, files: map[string]string{"/bin/busybox": "/bin/busybox"}}
	for _, tool := range tools {
		if err := m.addTool(tool); err != nil {
			t.Fatal(err)
		}
	}
	if g.daemons {
		// Only the image that the tests use: unpacking an image takes most of a minute on a slow
		// machine.
		lacks := append([]string{"guest", "clients", "previous", "vm", "dist", "next", "images/hello.tar"}, g.lacks...)
		if err := m.addFolder("/opt/keelson", daemonFolder(), lacks...); err != nil {
			t.Fatal(err)
		}
	}
	m.addFileTools(t)
	m.files["/etc/passwd"] = filepath.Join(dir, "passwd")
	if err := os.WriteFile(m.files["/etc/passwd"], []byte(users), 0o644); err != nil {
		t.Fatal(err)
	}
	m.files["/init"] = filepath.Join(dir, "init")
	buildStatic(t, m.files["/init"], "build", "./init")
	for name, args := range g.binaries {
		m.files[name] = filepath.Join(dir, filepath.Base(name))
		buildStatic(t, m.files[name], args...)
	}
	m.plan.Programs = g.programs(m, t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	start := time.Now()
	ended := map[string]int{} // with which status
	said := map[string]*transcript{}
	for _, p := range m.plan.Programs {
		said[p.Name] = &transcript{}
	}
	var clock guestClock
	console, err := m.runGuest(ctx, qemu, func(r plan.Report) {
		clock.addSample(time.Now(), r.Clock)
		if r.Line != "" {
			t.Logf("%6.2f %s: %s", time.Since(start).Seconds(), r.Program, r.Line)
			said[r.Program].addLine(r.Line)
		}
		if r.Exit != nil {
			ended[r.Program] = *r.Exit
		}
		if r.Fault != "" {
			failures.report(t, "the guest: "+r.Fault)
		}
	})
	if r, ok := clock.ratio(); ok && (r < 0.8 || r > 1.25) {
		failures.report(t,
			fmt.Sprintf("the guest's clock ran %.2f times as fast as the host's: its time limits are wrong "+
				"by this factor", r))
	}
	fails := func(status int) bool { return status != 0 }
	if err != nil || t.Failed() || slices.ContainsFunc(slices.Collect(maps.Values(ended)), fails) {
		t.Logf("the kernel's output:\n%s", console)
	}
	if err != nil {
		failures.report(t, err.Error())
	}
	for _, p := range m.plan.Programs {
		if status, ok := ended[p.Name]; !ok {
			failures.report(t, fmt.Sprintf("program %q has not ended; its last lines:\n%s", p.Name,
				strings.Join(said[p.Name].last, "\n")))
		} else if fails(status) {
			failures.report(t, fmt.Sprintf("program %q: exit status %d; its failed tests:\n%s", p.Name, status,
				said[p.Name].failedOutput()))
		}
	}
}

// guestClock compares the guest's seconds with the host's.
type guestClock struct {
	first, last time.Time
	from, to    float64
}

// addSample adds a reading of the guest's clock.
func (c *guestClock) addSample(now time.Time, clock float64) {
	if c.first.IsZero() {
		c.first, c.from = now, clock
	}
	c.last, c.to = now, clock
}

// ratio returns the guest's seconds per second of the host. ok is false if the measured time is too
// short.
func (c *guestClock) ratio() (r float64, ok bool) {
	took := c.last.Sub(c.first).Seconds()
	return (c.to - c.from) / max(took, 1), took > 10
}
