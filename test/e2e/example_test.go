package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/test/testenv"
)

// The example of the README: it is applied, a port is forwarded to its Service, and the response
// has a pod's name and the text of its ConfigMap. F13
func TestExampleAnswers(t *testing.T) {
	w := newNamespace(t)
	k := func(args ...string) string {
		return testenv.Must(t, kubectlPrograms()["kctl"], append([]string{"-n", w.ns}, args...)...)
	}
	k("apply", "-f", filepath.Join("..", "..", "examples", "hello", "hello.yaml"))
	k("rollout", "status", "deployment/hello", "--timeout=180s")

	ctx, cancel := context.WithTimeout(context.Background(), 2*soon)
	defer cancel()
	forward := exec.CommandContext(ctx, kubectlPrograms()["kctl"], "-n", w.ns, "port-forward", "service/hello", ":80")
	forward.Env = append(os.Environ(), "KUBECONFIG="+testenv.Lab().Config.Kubeconfig)
	out, err := forward.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		_ = forward.Wait() // it was killed
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "Forwarding from 127.0.0.1:") {
		t.Fatalf("the output of port-forward is %q, %v", line, err)
	}
	address := strings.Fields(line)[2]
	testenv.Eventually(t, soon, func() error {
		resp, err := http.Get("http://" + address + "/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err == nil && (!strings.HasPrefix(string(body), "hello from hello-") ||
			!strings.Contains(string(body), "Hello from Keelson")) {
			err = fmt.Errorf("it answers %q", body)
		}
		return err
	})
}
