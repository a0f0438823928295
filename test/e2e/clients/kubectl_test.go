package clients

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/test/testenv"
)

// kubectlPrograms returns the paths of kctl and of the oldest and newest stock kubectl on the
// machine.
func kubectlPrograms() []string {
	out := []string{filepath.Join(testenv.Lab().Config.BinDir, "kctl")}
	stock := testenv.StockKubectl()
	if len(stock) == 0 {
		return out
	}
	oldest, newest := stock[0], stock[0]
	for _, s := range stock {
		if filepath.Base(s) > filepath.Base(newest) {
			newest = s
		}
	}
	return append(out, oldest, newest)
}

// runWithToken runs a program with a token as its only credential.
func runWithToken(t testing.TB, program, token string, args ...string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	ca, nothing := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "kubeconfig")
	for file, content := range map[string][]byte{ca: testenv.RestConfig(t).CAData, nothing: nil} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args = append([]string{"--kubeconfig", nothing, "--server", "https://" + testenv.Lab().Config.Listen,
		"--certificate-authority", ca, "--token", token}, args...)
	return testenv.Try(t, program, args...)
}

// requireWhoAmI checks the output of "auth whoami" with a token.
func requireWhoAmI(t testing.TB, program, token string, wants ...string) {
	t.Helper()
	out, err := runWithToken(t, program, token, "auth", "whoami")
	if filepath.Base(program) == "kubectl.1.27" { // which knows the preliminary versions only
		if err == nil || !strings.Contains(out, "the selfsubjectreviews API is not enabled in the cluster") {
			t.Errorf("kubectl 1.27 auth whoami: %v\n%s", err, out)
		}
		return
	}
	for _, want := range wants {
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s auth whoami: %v, want %q in\n%s", filepath.Base(program), err, want, out)
		}
	}
}
