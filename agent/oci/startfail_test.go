package oci

import (
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// expectStartFailure starts a container and requires an error that contains text.
func (r *rig) expectStartFailure(id, text string) {
	r.t.Helper()
	_, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id})
	if err == nil || !strings.Contains(err.Error(), text) {
		r.t.Errorf("start: %v, want an error with %q", err, text)
	}
}

// expectStartError requires that a container has ended with reason StartError and a message that contains text.
func (r *rig) expectStartError(id, text string) {
	r.t.Helper()
	st := r.inspectContainer(id)
	if st.State != cri.ContainerState_CONTAINER_EXITED || st.Reason != "StartError" || st.ExitCode != 128 ||
		!strings.Contains(st.Message, text) || st.StartedAt < st.CreatedAt || st.FinishedAt < st.StartedAt {
		r.t.Errorf("status %v, want StartError, code 128, both times and %q", st, text)
	}
}

const noProgram = `exec: "nosuch": executable file not found in $PATH`

// F126: a container whose command cannot be executed is created; its start fails and ends it with StartError.
func TestCommandThatCannotBeExecuted(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	for text, change := range map[string]func(*cri.ContainerConfig){
		noProgram:                  func(c *cri.ContainerConfig) { c.Command = []string{"nosuch"} },
		`exec: "/no/such/program"`: func(c *cri.ContainerConfig) { c.Command = []string{"/no/such/program"} },
		`exec: "/etc"`:             func(c *cri.ContainerConfig) { c.Command = []string{"/etc"} },
		`/etc/passwd`:              func(c *cri.ContainerConfig) { c.WorkingDir = "/etc/passwd" },
		`exec: "LLLL`:              func(c *cri.ContainerConfig) { c.Command = []string{strings.Repeat("L", 100_000)} },
	} {
		config := r.containerConfig("a", "true", change)
		id := r.createContainer(sb, sc, config)
		if again := r.createContainer(sb, sc, config); again != id {
			t.Errorf("a repeated request created %s beside %s", again, id)
		}
		if st := r.inspectContainer(id); st.State != cri.ContainerState_CONTAINER_CREATED {
			t.Errorf("before the start: %v", st)
		}
		r.expectStartFailure(id, text)
		r.expectStartError(id, text)
		if n := len(r.inspectContainer(id).Message); n > maxStartError {
			t.Errorf("the message has %d bytes, more than %d", n, maxStartError)
		}
		r.expectStartFailure(id, "it is exited")
		if _, err := r.RemoveContainer(r.ctx(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
			t.Error(err)
		}
	}
}

// F126: the start error survives restarts of the agent, before the start and after it.
func TestStartErrorSurvivesAgentRestart(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	bad := func(c *cri.ContainerConfig) { c.Command = []string{"nosuch"} }
	early := r.createContainer(sb, sc, r.containerConfig("early", "", bad))
	late := r.createContainer(sb, sc, r.containerConfig("late", "", bad))
	stopped := r.createContainer(sb, sc, r.containerConfig("stopped", "", bad))
	r.expectStartFailure(late, noProgram)
	ended := r.inspectContainer(late)
	r.restartRuntime()
	if st := r.inspectContainer(early); st.State != cri.ContainerState_CONTAINER_CREATED {
		t.Errorf("after the restart: %v", st)
	}
	r.expectStartFailure(early, noProgram)
	r.expectStartError(early, noProgram)
	r.expectStartError(late, noProgram)
	if st := r.inspectContainer(late); st.FinishedAt != ended.FinishedAt || st.StartedAt != ended.StartedAt {
		t.Errorf("after the restart the times are %v, before %v", st, ended)
	}
	if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: stopped, Timeout: 1}); err != nil {
		t.Error(err)
	}
	r.expectStartError(stopped, noProgram)
}

// F126: the start error survives a power cut.
func TestStartErrorSurvivesPowerCut(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.createContainer(sb, sc, r.containerConfig("a", "", func(c *cri.ContainerConfig) {
		c.Command = []string{"nosuch"}
	}))
	r.expectStartFailure(id, noProgram)
	r.waitFilePrefix(r.paths.endFile(id), "128 ")
	r.simulatePowerCut()
	r.startRuntime()
	r.expectStartError(id, noProgram)
	if _, err := r.RemoveContainer(r.ctx(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
		t.Error(err)
	}
}
