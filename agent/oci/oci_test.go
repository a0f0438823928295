package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// F98
func TestContainerFromCreateToExit(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.createContainer(sb, sc, r.containerConfig("a", "echo out; echo err >&2; printf part; exit 3"))
	if st := r.inspectContainer(id); st.State != cri.ContainerState_CONTAINER_CREATED || st.CreatedAt == 0 ||
		st.StartedAt != 0 {
		t.Errorf("after create: %v", st)
	}
	if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	st := r.waitExit(id)
	if st.ExitCode != 3 || st.Reason != "Error" || st.StartedAt < st.CreatedAt || st.FinishedAt < st.StartedAt ||
		st.ImageId != "sha256:tools" {
		t.Errorf("after exit: %v", st)
	}
	r.expectLines("a", "stdout F out", "stderr F err", "stdout P part")
}

// expectLines fails if a log lacks any of the lines.
func (r *rig) expectLines(name string, want ...string) {
	r.t.Helper()
	got := r.readLog(name)
	for _, w := range want {
		if !strings.Contains("\n"+got, "\n"+w+"\n") {
			r.t.Errorf("log of %s lacks %q; it is\n%s", name, w, got)
		}
	}
}

// F98
func TestVerbsAreIdempotentAndOrdered(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	again, err := r.RunPodSandbox(r.ctx(), &cri.RunPodSandboxRequest{Config: sc})
	if err != nil || again.PodSandboxId != sb {
		t.Errorf("run again: %v, %v; want %s", again, err, sb)
	}
	cc := r.containerConfig("a", "trap 'exit 0' TERM; echo armed; sleep 1000 & wait")
	id := r.createContainer(sb, sc, cc)
	if second := r.createContainer(sb, sc, cc); second != id {
		t.Errorf("create again: %s, want %s", second, id)
	}
	for range 2 {
		if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); err != nil {
			t.Errorf("start: %v", err)
		}
	}
	r.waitLog("a", "armed")
	if _, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sb, Config: cc}); status.Code(
		err) != codes.AlreadyExists {
		t.Errorf("create what runs: %v", err)
	}
	for range 2 {
		if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: id, Timeout: 10}); err != nil {
			t.Errorf("stop: %v", err)
		}
	}
	if st := r.inspectContainer(id); st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("after a graceful stop: %v", st)
	}
	if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); status.Code(err) !=
		codes.FailedPrecondition {
		t.Errorf("start what has ended: %v", err)
	}
	for range 2 {
		if _, err := r.RemoveContainer(r.ctx(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
			t.Errorf("remove: %v", err)
		}
		if _, err := r.StopPodSandbox(r.ctx(), &cri.StopPodSandboxRequest{PodSandboxId: sb}); err != nil {
			t.Errorf("stop sandbox: %v", err)
		}
	}
	if _, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sb, Config: cc}); status.Code(
		err) != codes.FailedPrecondition {
		t.Errorf("create in a stopped sandbox: %v", err)
	}
	for range 2 {
		if _, err := r.RemovePodSandbox(r.ctx(), &cri.RemovePodSandboxRequest{PodSandboxId: sb}); err != nil {
			t.Errorf("remove sandbox: %v", err)
		}
	}
	if _, err := r.PodSandboxStatus(r.ctx(), &cri.PodSandboxStatusRequest{PodSandboxId: sb}); status.Code(err) !=
		codes.NotFound {
		t.Errorf("status of what is gone: %v", err)
	}
	if n := r.net.count(); n != 0 {
		t.Errorf("%d networks are still attached", n)
	}
}

func nsOf(t *testing.T, pid any, kind string) string {
	t.Helper()
	l, err := os.Readlink(fmt.Sprintf("/proc/%v/ns/%s", pid, kind))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (r *rig) pidOf(id string) int {
	r.t.Helper()
	c, err := r.Runtime.findContainer(id)
	if err != nil {
		r.t.Fatal(err)
	}
	pids := r.cgroups.ProcessIDs(c.rec.Cgroup)
	if len(pids) == 0 {
		r.t.Fatal("no process in the container's cgroup")
	}
	return pids[0]
}

// F100 F102 F103
func TestNamespaces(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	a := r.runContainer(sb, sc, r.containerConfig("a",
		"echo hello > /tmp/index.html; exec httpd -f -p 127.0.0.1:8080 -h /tmp"))
	b := r.runContainer(sb, sc, r.containerConfig("b", "exec sleep 1000"))
	pa, pb := r.pidOf(a), r.pidOf(b)
	for _, kind := range []string{"pid", "net", "mnt", "ipc", "uts"} {
		if nsOf(t, pa, kind) == nsOf(t, "self", kind) {
			t.Errorf("the container is in the host's %s namespace", kind)
		}
		shared := kind == "net" || kind == "ipc" || kind == "uts"
		if same := nsOf(t, pa, kind) == nsOf(t, pb, kind); same != shared {
			t.Errorf("containers share their %s namespace: %v, want %v", kind, same, shared)
		}
	}
	out, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: b, Cmd: []string{"sh", "-c",
		"for i in $(seq 300); do wget -q -O - http://127.0.0.1:8080/ && break; usleep 100000; done; " +
			"hostname; echo $$"}})
	if err != nil || !strings.HasPrefix(string(out.Stdout), "hello\npod1\n") {
		t.Errorf("B calls A on localhost: %q %q, %v", out.GetStdout(), out.GetStderr(), err)
	}
	out, err = r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: a,
		Cmd: []string{"sh", "-c", "echo shared > /dev/shm/x; ps | grep -c '[s]leep'"}})
	if err != nil || strings.TrimSpace(string(out.Stdout)) != "0" {
		t.Errorf("A sees B's processes: %q, %v", out.GetStdout(), err)
	}
	out, err = r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: b, Cmd: []string{"cat", "/dev/shm/x"}})
	if err != nil || string(out.Stdout) != "shared\n" {
		t.Errorf("/dev/shm is not shared: %q, %v", out.GetStdout(), err)
	}
}

func TestSharedProcessNamespace(t *testing.T) {
	r := newRig(t)
	pod := func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
		c.Linux.SecurityContext.Capabilities = &cri.Capability{AddCapabilities: []string{"SYS_PTRACE"}}
	}
	sb, sc := r.runSandbox(func(c *cri.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	})
	a := r.runContainer(sb, sc, r.containerConfig("a", "sleep 1000 & exec sleep 2000", pod))
	out, _ := r.runToEnd(sb, sc, "b", "ps -o pid,comm | head -2; ls /proc/1/root/; ls /proc/1/root/.. | head; kill "+
		"$(pidof -s sleep) || true", pod)
	if !strings.Contains(out, "1 keelson-pause") {
		t.Errorf("pause is not the first process: %s", out)
	}
	if strings.Contains(out, "usr") || strings.Contains(out, "stdout F etc") {
		t.Errorf("the host is seen behind pause: %s", out)
	}
	if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: a}); err != nil {
		t.Fatal(err)
	}
	c, _ := r.Runtime.findContainer(a)
	if left := r.cgroups.ProcessIDs(c.rec.Cgroup); len(left) > 0 {
		t.Errorf("cannot kill the remaining processes of an ended container: %v", left)
	}
}

func TestHostNamespaces(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox(func(c *cri.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Network: cri.NamespaceMode_NODE,
			Pid: cri.NamespaceMode_NODE, Ipc: cri.NamespaceMode_NODE}
	})
	id := r.runContainer(sb, sc, r.containerConfig("a", "sleep 1000 & exec sleep 2000", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Network: cri.NamespaceMode_NODE,
			Pid: cri.NamespaceMode_NODE, Ipc: cri.NamespaceMode_NODE}
	}))
	pid := r.pidOf(id)
	for _, kind := range []string{"pid", "net", "ipc", "uts"} {
		if nsOf(t, pid, kind) != nsOf(t, "self", kind) {
			t.Errorf("the container is not in the host's %s namespace", kind)
		}
	}
	if r.net.count() != 0 {
		t.Error("a pod with the host's network was attached to another")
	}
}

// F101
func TestAppCrashKeepsTheNetworkAndPauseDeathEndsTheSandbox(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	events := r.Events(r.ctx())
	before, err := os.Stat(r.paths.netnsPath(sb))
	if err != nil {
		t.Fatal(err)
	}
	r.runToEnd(sb, sc, "crash", "kill -9 $$")
	st, err := r.PodSandboxStatus(r.ctx(), &cri.PodSandboxStatusRequest{PodSandboxId: sb})
	if err != nil || st.Status.State != cri.PodSandboxState_SANDBOX_READY || st.Status.Network.Ip != "192.0.2.7" ||
		len(st.Status.Network.AdditionalIps) != 1 {
		t.Errorf("after a crash of the app: %v, %v", st, err)
	}
	id := r.runContainer(sb, sc, r.containerConfig("next", "exec sleep 1000"))
	inside, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", r.pidOf(id)))
	if err != nil || !os.SameFile(before, inside) {
		t.Errorf("the restarted app is in another network namespace (%v)", err)
	}
	s, _ := r.Runtime.findSandbox(sb)
	killIfNamed(s.rec.PausePID, "keelson-pause")
	for e := range events {
		if e.SandboxID != sb || e.ContainerID != "" {
			continue
		}
		st, err := r.PodSandboxStatus(r.ctx(), &cri.PodSandboxStatusRequest{PodSandboxId: sb})
		if err != nil || st.Status.State != cri.PodSandboxState_SANDBOX_NOTREADY {
			t.Errorf("after the death of pause: %v, %v", st, err)
		}
		break
	}
	if _, err := r.StopPodSandbox(r.ctx(), &cri.StopPodSandboxRequest{PodSandboxId: sb}); err != nil {
		t.Error(err)
	}
	sc.Metadata.Attempt++
	if again, err := r.RunPodSandbox(r.ctx(), &cri.RunPodSandboxRequest{Config: sc}); err != nil ||
		again.PodSandboxId == sb {
		t.Errorf("the sandbox is not rebuilt: %v, %v", again, err)
	}
}

// F104
func TestResources(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox(func(c *cri.PodSandboxConfig) {
		c.Linux.CgroupParent = "/burst/poduid1"
		c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 256 << 20}
	})
	out, st := r.runToEnd(sb, sc, "hog", "echo start; tail /dev/zero", func(c *cri.ContainerConfig) {
		c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 32 << 20}
	})
	if st.Reason != "OOMKilled" || st.ExitCode != 137 {
		t.Errorf("a hog ended with %d %s (%s)", st.ExitCode, st.Reason, out)
	}
	id := r.runContainer(sb, sc, r.containerConfig("limited", "exec sleep 1000", func(c *cri.ContainerConfig) {
		c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 204, CpuQuota: 50000, CpuPeriod: 100000,
			MemoryLimitInBytes: 64 << 20, Unified: map[string]string{"pids.max": "77"}}
	}))
	r.expectLimits(id, map[string]string{"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.shares": "204",
		"memory/memory.limit_in_bytes": "67108864", "pids/pids.max": "77"},
		map[string]string{"cpu.max": "50000 100000", "cpu.weight": weightOf(204), "memory.max": "67108864",
			"memory.swap.max": "0", "memory.high": "max", "pids.max": "77"})
	file := "/sys/fs/cgroup/memory" + r.cfg.CgroupRoot + "/burst/poduid1/memory.limit_in_bytes"
	if r.cgroups.Unified {
		file = "/sys/fs/cgroup" + r.cfg.CgroupRoot + "/burst/poduid1/memory.max"
	}
	b, err := os.ReadFile(file)
	if err != nil || strings.TrimSpace(string(b)) != "268435456" {
		t.Errorf("the pod's limit is %q (%v)", b, err)
	}
}

// expectLimits reads a container's cgroup: the files of v1, each below its controller, or those of v2.
func (r *rig) expectLimits(id string, v1, v2 map[string]string) {
	r.t.Helper()
	c, err := r.Runtime.findContainer(id)
	if err != nil {
		r.t.Fatal(err)
	}
	want, path := v1, func(file string) string {
		controller, name, _ := strings.Cut(file, "/")
		return filepath.Join("/sys/fs/cgroup", controller, r.cfg.CgroupRoot, c.rec.Cgroup, name)
	}
	if r.cgroups.Unified {
		want, path = v2, func(file string) string {
			return filepath.Join("/sys/fs/cgroup", r.cfg.CgroupRoot, c.rec.Cgroup, file)
		}
	}
	for file, value := range want {
		if b, err := os.ReadFile(path(file)); err != nil || strings.TrimSpace(string(b)) != value {
			r.t.Errorf("%s is %q, want %s (%v)", file, b, value, err)
		}
	}
}

// F105
func TestSeccomp(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	const script = "unshare -U true; echo code $?; ls / >/dev/null && echo works"
	out, _ := r.runToEnd(sb, sc, "free", script)
	if !strings.Contains(out, "code 0") {
		t.Skipf("this kernel lets nobody make user namespaces: %s", out)
	}
	out, _ = r.runToEnd(sb, sc, "default", script, func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	})
	if !strings.Contains(out, "Operation not permitted") || !strings.Contains(out, "works") {
		t.Errorf("RuntimeDefault: %s", out)
	}
	dir := filepath.Join(r.cfg.StateDir, "seccomp")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	profile := `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO"}]}`
	if err := os.WriteFile(filepath.Join(dir, "nomkdir.json"), []byte(profile), 0o600); err != nil {
		t.Fatal(err)
	}
	out, _ = r.runToEnd(sb, sc, "local", "mkdir /tmp/x; echo code $?", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost,
			LocalhostRef: "nomkdir.json"}
	})
	if !strings.Contains(out, "code 1") {
		t.Errorf("Localhost: %s", out)
	}
	for _, ref := range []string{"missing.json", "../../../etc/passwd"} {
		cc := r.containerConfig("bad", "true", func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost,
				LocalhostRef: ref}
		})
		if _, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sb, Config: cc}); err ==
			nil || !strings.Contains(err.Error(), ref) {
			t.Errorf("profile %s: %v", ref, err)
		}
	}
}

func TestSecurityContext(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox(func(c *cri.PodSandboxConfig) {
		c.Linux.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "99", "kernel.shm_rmid_forced": "1"}
	})
	host := t.TempDir()
	if err := os.WriteFile(host+"/f", []byte("host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	script :=
		`id -u; id -G; grep -E 'CapEff|NoNewPrivs' /proc/self/status; touch /x 2>&1; touch /ro/x 2>&1; touch /tmp/ok && echo tmp; cat /ro/f
cat /etc/resolv.conf; cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/kernel/shm_rmid_forced; cat /proc/kcore; echo kcore $?; echo $FROM_IMAGE $SHARED $ADDED; pwd; cat /data/file; touch /data/new && echo volume`
	out, st := r.runToEnd(sb, sc, "a", script, func(c *cri.ContainerConfig) {
		c.WorkingDir = "/made/here"
		c.Envs = []*cri.KeyValue{{Key: "SHARED", Value: []byte("request")}, {Key: "ADDED", Value: []byte("a=b")}}
		c.Mounts = []*cri.Mount{{ContainerPath: "/ro", HostPath: host, Readonly: true},
			{ContainerPath: "/tmp", HostPath: t.TempDir()}}
		c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000}
		c.Linux.SecurityContext.SupplementalGroups = []int64{3000}
		c.Linux.SecurityContext.NoNewPrivs = true
		c.Linux.SecurityContext.ReadonlyRootfs = true
		c.Linux.SecurityContext.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
	})
	r.expectLines("a", "stdout F 1000", "stdout F 1001 2000 3000", "stdout F CapEff:\t0000000000000000",
		"stdout F NoNewPrivs:\t1",
		"stdout F host", "stdout F search test.svc", "stdout F nameserver 192.0.2.1", "stdout F options ndots:5",
		"stdout F 99", "stdout F 1",
		"stdout F yes request a=b", "stdout F /made/here", "stdout F from the image")
	if strings.Count(out, "Read-only file system") != 2 {
		t.Errorf("root or volume can be written:\n%s", out)
	}
	if u := st.GetUser().GetLinux(); u.GetUid() != 1000 || u.GetGid() != 1001 ||
		fmt.Sprint(u.GetSupplementalGroups()) != "[1001 2000 3000]" {
		t.Errorf("user in the status: %v", u)
	}
	out, _ = r.runToEnd(sb, sc, "priv", "grep CapEff /proc/self/status; ls /dev | wc -l; mount -t tmpfs x /mnt || "+
		"mkdir /mnt && mount -t tmpfs x /mnt && echo mounted", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Privileged = true
	})
	if !strings.Contains(out, "mounted") {
		t.Errorf("privileged: %s", out)
	}
	out, _ = r.runToEnd(sb, sc, "user", "id -un; id -gn", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.RunAsUsername = "app"
	})
	if !strings.Contains(out, "stdout F app\nstdout F appgroup") {
		t.Errorf("user by name: %s", out)
	}
	for name, change := range map[string]func(*cri.ContainerConfig){
		"is not in the image's /etc/passwd": func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUsername = "ghost"
		},
		"unknown capability \"NOPE\"": func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.Capabilities = &cri.Capability{AddCapabilities: []string{"NOPE"}}
		},
		"image is not present": func(c *cri.ContainerConfig) { c.Image.Image = "missing" },
		"is not absolute": func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{ContainerPath: "rel", HostPath: "/"}}
		},
		"device /dev/no-such-thing": func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: "/dev/no-such-thing", ContainerPath: "/dev/x"}}
		},
	} {
		_, err := r.CreateContainer(r.ctx(),
			&cri.CreateContainerRequest{PodSandboxId: sb, Config: r.containerConfig("bad", "true", change)})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("want an error with %q, got %v", name, err)
		}
	}
}

func TestFailedSandboxLeavesNothing(t *testing.T) {
	r := newRig(t)
	r.net.fail = errors.New("plugin bridge: no addresses left")
	c := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "p", Namespace: "n", Uid: "u"}}
	if _, err := r.RunPodSandbox(r.ctx(), &cri.RunPodSandboxRequest{Config: c}); err == nil ||
		!strings.Contains(err.Error(), "no addresses left") || !strings.Contains(err.Error(), "n/p") {
		t.Errorf("error: %v", err)
	}
	if l := countLeaks(t, r.cfg); l.folders > 0 || l.mounts > 0 {
		t.Errorf("left behind: %+v", l)
	}
	r.net.fail = nil
	if _, err := r.RunPodSandbox(r.ctx(), &cri.RunPodSandboxRequest{Config: c}); err != nil {
		t.Errorf("another try: %v", err)
	}
	for _, bad := range []*cri.PodSandboxConfig{
		{},
		{Metadata: c.Metadata, Linux: &cri.LinuxPodSandboxConfig{Sysctls: map[string]string{"kernel.panic": "1"}}},
		{Metadata: c.Metadata, Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/../x"}},
	} {
		if _, err := r.RunPodSandbox(r.ctx(), &cri.RunPodSandboxRequest{Config: bad}); status.Code(err) !=
			codes.InvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
}
