package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// ephemeralStatus returns the status of a pod's ephemeral container, or an error if it has none.
func (w testNamespace) ephemeralStatus(pod, name string) (v1.ContainerStatus, error) {
	p, err := w.cs.CoreV1().Pods(w.ns).Get(context.Background(), pod, metav1.GetOptions{})
	if err != nil {
		return v1.ContainerStatus{}, err
	}
	for _, s := range p.Status.EphemeralContainerStatuses {
		if s.Name == name {
			return s, nil
		}
	}
	return v1.ContainerStatus{}, fmt.Errorf("pod %s has no status of ephemeral container %s", pod, name)
}

// awaitEphemeral waits until a pod's ephemeral container runs and returns its status.
func (w testNamespace) awaitEphemeral(pod, name string) (s v1.ContainerStatus) {
	w.Helper()
	testenv.Eventually(w.T, soon, func() (err error) {
		if s, err = w.ephemeralStatus(pod, name); err == nil && s.State.Running == nil {
			err = fmt.Errorf("ephemeral container %s: %+v", name, s.State)
		}
		return err
	})
	return s
}

// debuggedPod creates a pod whose containers run as an unprivileged user, and waits until it is
// ready.
func (w testNamespace) debuggedPod(name string) {
	w.Helper()
	p := sleeperPod(name)
	p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: new(int64(1000))}
	w.createPod(p)
	testenv.Kctl(w.T, "-n", w.ns, "wait", "--for=condition=Ready", "pod/"+name, "--timeout=180s")
}

// F128: kctl debug and stock kubectl debug run an ephemeral container that sees the processes of
// its target. Logs, exec and attach reach it. The pod stays as it is.
func TestDebugAPod(t *testing.T) {
	for name, path := range kubectlPrograms() {
		t.Run(name, func(t *testing.T) {
			w := newNamespace(t)
			w.debuggedPod("p")
			before := w.getPod("p").Status.ContainerStatuses[0]
			k := func(args ...string) string { return testenv.Must(t, path, append([]string{"-n", w.ns}, args...)...) }
			k("debug", "p", "-c", "seen", "--image="+tools, "--target=main", "--profile=general", "--attach=false",
				"--", "sh", "-c", "ps; exec sleep 1000")
			w.awaitEphemeral("p", "seen")
			testenv.Eventually(t, soon, func() error {
				return requireWords(k("logs", "p", "-c", "seen"), []string{"sleep 1000000"})
			})
			if out := k("exec", "p", "-c", "seen", "--", "echo", "inside"); !strings.Contains(out, "inside") {
				t.Errorf("exec: %s", out)
			}
			testenv.Eventually(t, soon, func() error { // events appear slightly later
				return requireWords(k("describe", "pod", "p"), []string{"Ephemeral Containers:", "seen", "Started"})
			})
			if out := runOnTerminal(t, w, path, "debug", "p", "-it", "-c", "shell", "--image="+tools, "--target=main",
				"--profile=general", "--", "sh"); !strings.Contains(out, "answer 42") {
				t.Errorf("the shell on a terminal printed %q", out)
			}
			testenv.Eventually(t, soon, func() error {
				s, err := w.ephemeralStatus("p", "shell")
				if err == nil && (s.State.Terminated == nil || s.State.Terminated.ExitCode != 3) {
					err = fmt.Errorf("after exit 3 the shell is %+v", s.State)
				}
				return err
			})
			after := w.getPod("p")
			if s := after.Status.ContainerStatuses[0]; s.ContainerID != before.ContainerID || s.RestartCount != 0 ||
				!s.Ready || after.Status.Phase != v1.PodRunning {
				t.Errorf("the pod has changed: %+v", after.Status)
			}
		})
	}
}

// runOnTerminal runs a command of kubectl on a terminal, and a shell command in the container that
// it attaches to. It returns the output of the terminal.
func runOnTerminal(t *testing.T, w testNamespace, path string, args ...string) string {
	t.Helper()
	master, terminal := openTerminal(t)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, append([]string{"-n", w.ns}, args...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+testenv.Lab().Config.Kubeconfig)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	terminal.Close()
	if _, err := master.WriteString("echo answer $((40+2)); exit 3\n"); err != nil {
		t.Error(err)
	}
	var out strings.Builder
	for lines := bufio.NewScanner(master); lines.Scan(); { // ends when the command closes the terminal
		out.WriteString(lines.Text() + "\n")
	}
	_ = cmd.Wait() // the exit code of the shell is checked in its status
	return out.String()
}

// openTerminal opens a pseudoterminal. Both sides are closed at the end of the test.
func openTerminal(t *testing.T) (master, terminal *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	if terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	return master, terminal
}

// F128: every profile of kctl debug makes a container that runs, also the restricted profile in a
// namespace with the level restricted.
func TestDebugProfiles(t *testing.T) {
	w := newNamespace(t)
	w.debuggedPod("p")
	for _, profile := range []string{"legacy", "general", "baseline", "restricted", "netadmin", "sysadmin"} {
		testenv.Kctl(t, "-n", w.ns, "debug", "p", "-c", profile, "--image="+tools, "--target=main",
			"--profile="+profile, "--attach=false", "--", "sleep", "1000")
	}
	for _, profile := range []string{"legacy", "general", "baseline", "restricted", "netadmin", "sysadmin"} {
		w.awaitEphemeral("p", profile)
	}
	testenv.Kctl(t, "label", "namespace", w.ns, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
	strict := sleeperPod("strict")
	yes, no := true, false
	strict.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: new(int64(1000)), RunAsNonRoot: &yes,
		SeccompProfile: &v1.SeccompProfile{Type: v1.SeccompProfileTypeRuntimeDefault}}
	strict.Spec.Containers[0].SecurityContext = &v1.SecurityContext{AllowPrivilegeEscalation: &no,
		Capabilities: &v1.Capabilities{Drop: []v1.Capability{"ALL"}}}
	w.createPod(strict)
	testenv.Kctl(t, "-n", w.ns, "wait", "--for=condition=Ready", "pod/strict", "--timeout=180s")
	testenv.Kctl(t, "-n", w.ns, "debug", "strict", "-c", "modest", "--image="+tools, "--profile=restricted",
		"--attach=false", "--", "sleep", "1000")
	w.awaitEphemeral("strict", "modest")
	out, err := testenv.Try(t, kubectlPrograms()["kctl"], "-n", w.ns, "debug", "strict", "-c", "bold", "--image="+tools,
		"--profile=sysadmin", "--attach=false", "--", "sleep", "1000")
	if err == nil || !strings.Contains(out, `violates PodSecurity "restricted:latest": privileged (container "bold"`) {
		t.Errorf("a privileged container in a restricted namespace: %v %s", err, out)
	}
}

// F128: kctl debug of a node runs a pod that sees the files of the node.
func TestDebugANode(t *testing.T) {
	w := newNamespace(t)
	out := testenv.Kctl(t, "-n", w.ns, "debug", "node/w1", "--image="+tools, "--profile=general", "--attach=false",
		"--", "sh", "-c", "ls /host/etc/hostname && echo found")
	name := regexp.MustCompile(`node-debugger-w1-\w+`).FindString(out)
	if name == "" {
		t.Fatalf("no name of a pod in %q", out)
	}
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Try(t, kubectlPrograms()["kctl"], "-n", w.ns, "logs", name)
		if err != nil {
			return err
		}
		return requireWords(out, []string{"found"})
	})
}

// F128: an ephemeral container ends with its target. It is not restarted, while the target is.
func TestDebugContainerEndsWithItsTarget(t *testing.T) {
	w := newNamespace(t)
	p := newPod("p", tools, "sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait")
	w.createPod(p)
	testenv.Kctl(t, "-n", w.ns, "wait", "--for=condition=Ready", "pod/p", "--timeout=180s")
	testenv.Kctl(t, "-n", w.ns, "debug", "p", "-c", "dbg", "--image="+tools, "--target=main", "--profile=general",
		"--attach=false", "--", "sleep", "1000")
	started := w.awaitEphemeral("p", "dbg")
	testenv.Kctl(t, "-n", w.ns, "exec", "p", "-c", "main", "--", "kill", "1")
	testenv.Eventually(t, soon, func() error {
		s, err := w.ephemeralStatus("p", "dbg")
		if err != nil {
			return err
		}
		main := w.getPod("p").Status.ContainerStatuses[0]
		if s.State.Terminated == nil || main.RestartCount != 1 || main.State.Running == nil {
			return fmt.Errorf("ephemeral container %+v, target %+v", s.State, main)
		}
		if s.ContainerID != started.ContainerID || s.RestartCount != 0 || s.State.Terminated.ExitCode != 137 {
			t.Errorf("the ephemeral container was restarted, or ended otherwise: %+v", s)
		}
		return nil
	})
	begun := time.Now()
	testenv.Kctl(t, "-n", w.ns, "delete", "pod", "p", "--timeout=60s")
	t.Logf("deleted in %s", time.Since(begun).Round(time.Millisecond))
}
