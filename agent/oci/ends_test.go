package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"keelson.dev/keelson/agent/oci/netns"
)

// simulatePowerCut simulates a power failure: processes, tmpfs contents and cgroups are lost.
func (r *rig) simulatePowerCut() {
	r.t.Helper()
	r.Runtime.mu.Lock()
	all := map[string]*sandbox{}
	for id, s := range r.sandboxes {
		all[id] = s
	}
	r.Runtime.mu.Unlock()
	r.stop()
	for id, s := range all {
		s.killShimAndPause() // the shim first, so that it records no exits
		r.eventually(func() error {
			if isRunningProcess(s.rec.ShimPID, "keelson-shim") || isRunningProcess(s.rec.PausePID, "keelson-pause") {
				return errors.New("shim or pause lives on")
			}
			return nil
		})
		if err := r.cgroups.KillProcesses(r.ctx(), s.cgroupPath()); err != nil {
			r.t.Fatal(err)
		}
		if err := errors.Join(unmountShm(r.paths.sandboxDir(id)), netns.RemovePinned(r.paths.netnsPath(id)),
			r.cgroups.RemoveCgroup(r.ctx(), s.cgroupPath())); err != nil {
			r.t.Fatal(err)
		}
	}
	if err := os.RemoveAll(r.cfg.RunDir); err != nil {
		r.t.Fatal(err)
	}
}

// The exit status of a container survives a power failure, whether or not an agent saw the exit. No
// secret is stored for that.
func TestEndsOutliveAPowerCut(t *testing.T) {
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprint("agent away=", away), func(t *testing.T) {
			r := newRig(t)
			sb, sc := r.runSandbox()
			fifo := filepath.Join(r.cfg.StateDir, "fifo")
			if err := unix.Mkfifo(fifo, 0o600); err != nil {
				t.Fatal(err)
			}
			id := r.runContainer(sb, sc, r.containerConfig("a", "cat /go; exit 42", func(c *cri.ContainerConfig) {
				c.Envs = []*cri.KeyValue{{Key: "PASSWORD", Value: []byte("hunter2")}}
				c.Args = []string{"--token=hunter2"}
				c.Labels, c.Annotations = map[string]string{"l": "1"}, map[string]string{"a": "2"}
				c.Metadata.Attempt = 7
				c.Mounts = []*cri.Mount{{ContainerPath: "/go", HostPath: fifo}}
			}))
			running := r.runContainer(sb, sc, r.containerConfig("b", "exec sleep 1000"))
			before := r.inspectContainer(id)
			if away {
				r.stop()
			}
			go func() {
				if f, err := os.OpenFile(fifo, os.O_WRONLY, 0); err == nil {
					f.Close()
				}
			}()
			r.eventually(func() error { _, err := os.Stat(r.paths.endFile(id)); return err })
			if !away {
				r.waitExit(id)
			}
			kept, err := os.ReadFile(r.paths.endFile(id))
			if err != nil || !strings.HasPrefix(string(kept), "42 ") || strings.Contains(string(kept), "hunter2") {
				t.Errorf("kept %q, %v", kept, err)
			}
			r.simulatePowerCut()
			r.startRuntime()
			st := r.inspectContainer(id)
			if st.State != cri.ContainerState_CONTAINER_EXITED || st.ExitCode != 42 || st.Reason != "Error" ||
				st.StartedAt < st.CreatedAt ||
				st.FinishedAt < st.StartedAt || st.Metadata.Attempt != 7 || st.Labels["l"] != "1" ||
				st.Annotations["a"] != "2" ||
				st.LogPath != before.LogPath || st.Image.Image != "tools" || st.ImageRef != before.ImageRef {
				t.Errorf("after the power cut: %v", st)
			}
			list, err := r.ListContainers(r.ctx(),
				&cri.ListContainersRequest{Filter: &cri.ContainerFilter{LabelSelector: map[string]string{"l": "1"}}})
			if err != nil || len(list.Containers) != 1 || list.Containers[0].Id != id {
				t.Errorf("listed: %v, %v", list, err)
			}
			if _, err := r.ContainerStatus(r.ctx(), &cri.ContainerStatusRequest{ContainerId: running}); err == nil {
				t.Error("a container that ran is still there")
			}
			r.restartRuntime()
			if st := r.inspectContainer(id); st.ExitCode != 42 {
				t.Errorf("after one more restart: %v", st)
			}
			if _, err := r.RemoveContainer(r.ctx(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
				t.Error(err)
			}
			if left, _ := os.ReadDir(r.paths.endFile("")); len(left) != 0 {
				t.Errorf("left after its removal: %v", left)
			}
		})
	}
}

// For shims of earlier releases, which do not store exit statuses, the agent stores them.
func TestAgentKeepsEndsThatTheShimDoesNot(t *testing.T) {
	r := newRig(t)
	r.stop()
	newOldShim(t, r.plantRecords(0), nil)
	r.startRuntime()
	if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: oldContainer, Timeout: 10}); err !=
		nil {
		t.Fatal(err)
	}
	r.waitFilePrefix(r.paths.endFile(oldContainer), "9 1004 1002\n{")
	c, err := r.loadEnd(oldContainer)
	if err != nil || c.exit != (exitRecord{Code: 9, Finished: 1004, Started: 1002}) || c.config.Metadata.Name != "a" ||
		c.rec.Cgroup != "/podolduid/c0c0" {
		t.Errorf("kept %+v, %v", c, err)
	}
}

func (r *rig) waitFilePrefix(path, text string) {
	r.t.Helper()
	r.eventually(func() error {
		b, err := os.ReadFile(path)
		if err == nil && !strings.HasPrefix(string(b), text) {
			err = fmt.Errorf("%s holds %q", path, b)
		}
		return err
	})
}

// Files damaged by a power failure are removed, and no others.
func TestTornEnds(t *testing.T) {
	r := newRig(t)
	r.stop()
	for name, text := range map[string]string{"empty": "", "half": "1 2", "nonote": "1 2 3\n", "id.new": "1 2 3\n{}",
		"nocgroup": `1 2 3` + "\n" + `{"id":"nocgroup","config":"CgMKAWE="}`,
		"later": `1 2 3 new=1` + "\n" +
			`{"version":9,"id":"later","config":"CgMKAWE=","cgroup":"/podx/y","new":{}}`} {
		if err := os.WriteFile(r.paths.endFile(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.startRuntime()
	if st := r.inspectContainer("later"); st.ExitCode != 1 || st.Metadata.Name != "a" {
		t.Errorf("of a later release: %v", st)
	}
	left, err := os.ReadDir(r.paths.endFile(""))
	if err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := r.RemoveContainer(r.ctx(), &cri.RemoveContainerRequest{ContainerId: "later"}); err != nil {
		t.Error(err)
	}
}
