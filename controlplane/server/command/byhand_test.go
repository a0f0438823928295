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

// What the pages say first, by hand or with install.sh, makes a cluster whose printed token lets in both further replicas of a
// control plane of three, as the lines below it have it.
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
			n := slices.IndexFunc(all, func(l docpages.Line) bool { return l.Boxed && strings.HasPrefix(l.Text, c.begins) })
			if n < 0 {
				t.Fatalf("%s.md has no line that begins with %q", c.page, c.begins)
			}
			letsInTwo(t, flagsOfInit(all[n].Text))
		})
	}
}

// flagsOfInit are those that a line has init run with, but for the address.
func flagsOfInit(line string) []string {
	var out []string
	for word := range strings.FieldsSeq(line) {
		word, given := strings.CutPrefix(word, "--init-flag=")
		if given || strings.HasPrefix(word, "--") && !strings.HasPrefix(word, "--advertise-address") && !strings.Contains(line, "install.sh") {
			out = append(out, word)
		}
	}
	return out
}

func letsInTwo(t *testing.T, flags []string) {
	dir := filepath.Join(t.TempDir(), "data")
	said, err := run(append([]string{"init", "--name=cp1", "--data-dir=" + dir, "--advertise-address=" + local}, flags...)...)
	if err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	token := regexp.MustCompile(`keelson1\.controlplane\.\S+`).FindString(said)
	url := withPorts(t, dir)
	serving(t, dir, url, func(*http.Client) {
		for _, name := range []string{"cp2", "cp3"} {
			out, err := run("join", "--name="+name, "--data-dir="+filepath.Join(t.TempDir(), name), "--advertise-address=127.0.0.22",
				"--server="+local+":"+fleetPort(t, dir), "--token="+token, "--config=")
			if err != nil {
				t.Errorf("%s with the token that 'init %s' printed: %v: %s", name, strings.Join(flags, " "), err, out)
			}
		}
	})
}

// fleetPort is where the replica of a data folder listens for agents and for replicas that join.
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

// A machine whose sessions are told of a proxy joins without it: that reaches other networks, and not the replicas.
func TestJoinGoesThroughNoProxy(t *testing.T) {
	if line := os.Getenv("KEELSON_TEST_JOIN"); line != "" { // in the process below: the variables are read once in each
		if out, err := run(strings.Split(line, "\n")...); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	const listens = "127.0.0.1"
	dir := filepath.Join(t.TempDir(), "data")
	said, err := run("init", "--name=cp1", "--data-dir="+dir, "--advertise-address="+listens)
	if err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	url := withPortsAt(t, dir, listens)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	proxy := "http://" + closed.Addr().String()
	closed.Close()
	serving(t, dir, url, func(*http.Client) {
		// The kernel takes 0.0.0.0 for this machine, and Go for no loopback address: of these proxies are never asked.
		line := []string{"join", "--name=cp2", "--data-dir=" + filepath.Join(t.TempDir(), "cp2"), "--advertise-address=127.0.0.22",
			"--server=0.0.0.0:" + fleetPort(t, dir), "--token=" + regexp.MustCompile(`keelson1\.controlplane\.\S+`).FindString(said), "--config="}
		c := exec.Command(os.Args[0], "-test.run=^TestJoinGoesThroughNoProxy$")
		c.Env = append(os.Environ(), "KEELSON_TEST_JOIN="+strings.Join(line, "\n"), "HTTPS_PROXY="+proxy, "https_proxy="+proxy, "NO_PROXY=", "no_proxy=")
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
}
