package oci

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// joinProcesses makes a container share the processes of the target.
func joinProcesses(target string) func(*cri.ContainerConfig) {
	return func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_TARGET
		c.Linux.SecurityContext.NamespaceOptions.TargetId = target
	}
}

// startIntruder starts a process in the test's own namespaces. The result moves it to the cgroup of
// a container, where the first stage of an exec is in such a state.
func startIntruder(r *rig) (join func(container string)) {
	r.t.Helper()
	cmd := exec.Command("/bin/busybox", "sleep", "1000")
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { // before the cleanup of the rig
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return func(container string) {
		r.t.Helper()
		c, err := r.Runtime.findContainer(container)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, dir := range r.cgroups.CgroupPaths(c.rec.Cgroup) {
			if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)),
				0); err != nil {
				r.t.Fatal(err)
			}
		}
	}
}

// A container with a target joins the PID namespace of the target's first process, and no other
// namespace of the target. Its end leaves the target alone. The end of the target ends it. F128
func TestTargetProcessNamespace(t *testing.T) {
	r := newRig(t)
	joinCgroup := startIntruder(r) // before the target, so that its PID is usually lower
	sb, sc := r.runSandbox()
	target := r.runContainer(sb, sc, r.containerConfig("app", "exec sleep 2000"))
	first := r.pidOf(target)
	joinCgroup(target)
	debug := r.runContainer(sb, sc, r.containerConfig("debug", "sleep 3000 & exec sleep 4000", joinProcesses(target)))
	pid := r.pidOf(debug)
	if nsOf(t, pid, "pid") != nsOf(t, first, "pid") || nsOf(t, pid, "mnt") == nsOf(t, first, "mnt") {
		t.Errorf("the container is in PID namespace %s, its target in %s", nsOf(t, pid, "pid"),
			nsOf(t, first, "pid"))
	}
	out, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: debug, Cmd: []string{"ps", "-o", "pid,args"}})
	if s := string(out.GetStdout()); err != nil || !strings.Contains(s, "1 sleep 2000") || strings.Contains(s, "shim") {
		t.Errorf("the container does not see exactly the processes of its target: %.300q, %v", s, err)
	}
	if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: debug}); err != nil {
		t.Fatal(err)
	}
	c, _ := r.Runtime.findContainer(debug)
	if left := r.cgroups.ProcessIDs(c.rec.Cgroup); len(left) > 0 {
		t.Errorf("processes of the ended container remain: %v", left)
	}
	if st := r.inspectContainer(target); st.State != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("after the end of the container its target is %s", st.State)
	}
	second := r.runContainer(sb, sc, r.containerConfig("second", "exec sleep 1000", joinProcesses(target)))
	if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: target}); err != nil {
		t.Fatal(err)
	}
	if st := r.waitExit(second); st.ExitCode != 137 {
		t.Errorf("the container of an ended target has exit code %d, want 137", st.ExitCode)
	}
}

// A target must run, and in the same sandbox: another pod's processes are never shared. F128
func TestTargetIsRefused(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	running := r.runContainer(sb, sc, r.containerConfig("app", "exec sleep 2000"))
	ended := r.runContainer(sb, sc, r.containerConfig("ended", "exit 0"))
	r.waitExit(ended)
	created := r.createContainer(sb, sc, r.containerConfig("created", "exec sleep 2000"))
	other, otherConfig := r.runSandbox()
	for _, c := range []struct {
		name, sandbox, target string
		config                *cri.PodSandboxConfig
		code                  codes.Code
	}{
		{"a target that has ended", sb, ended, sc, codes.FailedPrecondition},
		{"a target that was not started", sb, created, sc, codes.FailedPrecondition},
		{"a target of another sandbox", other, running, otherConfig, codes.InvalidArgument},
		{"a target that does not exist", sb, "none", sc, codes.NotFound},
	} {
		_, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: c.sandbox,
			SandboxConfig: c.config, Config: r.containerConfig("debug", "exec sleep 1000", joinProcesses(c.target))})
		if status.Code(err) != c.code {
			t.Errorf("%s: %v, want code %s", c.name, err, c.code)
		}
	}
}
