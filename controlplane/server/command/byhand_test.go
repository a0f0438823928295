package command

import (
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"keelson.dev/keelson/test/docpages"
)

// The first command line of each page, by hand or with install.sh, creates a cluster whose printed
// token admits two further replicas.
func TestPagesMakeThreeReplicas(t *testing.T) {
	for _, c := range []struct{ page, begins string }{
		{"../README", "keelson-controlplane init "},
		{"../README", "sudo ./install.sh server --init "},
		{"how-to/install-with-script", "sudo ./install.sh server --init "},
	} {
		t.Run(filepath.Base(c.page)+" "+c.begins, func(t *testing.T) {
			all, err := docpages.Read("../../../docs", c.page)
			if err != nil {
				t.Fatal(err)
			}
			n := slices.IndexFunc(all, func(l docpages.Line) bool {
				return l.InCodeBlock && strings.HasPrefix(l.Text, c.begins)
			})
			if n < 0 {
				t.Fatalf("%s.md has no line that begins with %q", c.page, c.begins)
			}
			checkTwoJoin(t, flagsOfInit(all[n].Text))
		})
	}
}

// flagsOfInit returns the flags of init in a line, except the address.
func flagsOfInit(line string) []string {
	var out []string
	for word := range strings.FieldsSeq(line) {
		word, given := strings.CutPrefix(word, "--init-flag=")
		if given || strings.HasPrefix(word, "--") && !strings.HasPrefix(word, "--advertise-address") &&
			!strings.Contains(line, "install.sh") {
			out = append(out, word)
		}
	}
	return out
}

func checkTwoJoin(t *testing.T, flags []string) {
	dir := filepath.Join(t.TempDir(), "data")
	said, err := runCommandLine(append([]string{"init", "--name=cp1", "--data-dir=" + dir,
		"--advertise-address=" + local},
		flags...)...)
	if err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	token := regexp.MustCompile(`keelson1\.controlplane\.\S+`).FindString(said)
	url := assignPorts(t, dir)
	runReplica(t, dir, url, func(*http.Client) {
		for _, name := range []string{"cp2", "cp3"} {
			out, err := runCommandLine("join", "--name="+name, "--data-dir="+filepath.Join(t.TempDir(), name),
				"--advertise-address=127.0.0.22",
				"--server="+local+":"+fleetPort(t, dir), "--token="+token, "--config=")
			if err != nil {
				t.Errorf("%s with the token that 'init %s' printed: %v: %s", name, strings.Join(flags, " "), err, out)
			}
		}
	})
}

// fleetPort returns the port for agents and joining replicas of a data directory.
func fleetPort(t *testing.T, dir string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "cluster.json"))
	if err != nil {
		t.Fatal(err)
	}
	var cluster struct{ FleetPort int }
	if err := json.Unmarshal(raw, &cluster); err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(cluster.FleetPort)
}

// A machine with proxy variables joins without the proxy, which is not meant for the replicas.
func TestJoinIgnoresProxies(t *testing.T) {
	if line := os.Getenv("KEELSON_TEST_JOIN"); line != "" { // in the child process
		if out, err := runCommandLine(strings.Split(line, "\n")...); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	const listens = "127.0.0.1"
	dir := filepath.Join(t.TempDir(), "data")
	said, err := runCommandLine("init", "--name=cp1", "--data-dir="+dir, "--advertise-address="+listens)
	if err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	url := assignPortsAt(t, dir, listens)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	proxy := "http://" + closed.Addr().String()
	closed.Close()
	runReplica(t, dir, url, func(*http.Client) {
		// The kernel treats 0.0.0.0 as this machine, but Go does not treat it as loopback. Go uses
		// no proxy for loopback addresses.
		line := []string{"join", "--name=cp2", "--data-dir=" + filepath.Join(t.TempDir(), "cp2"),
			"--advertise-address=127.0.0.22",
			"--server=0.0.0.0:" + fleetPort(t, dir),
			"--token=" + regexp.MustCompile(`keelson1\.controlplane\.\S+`).FindString(said), "--config="}
		c := exec.Command(os.Args[0], "-test.run=^TestJoinIgnoresProxies$")
		c.Env = append(os.Environ(), "KEELSON_TEST_JOIN="+strings.Join(line, "\n"), "HTTPS_PROXY="+proxy,
			"https_proxy="+proxy, "NO_PROXY=", "no_proxy=")
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
}
