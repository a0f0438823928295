package kctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv/loopback"
)

// oneReplica runs a cluster of one replica until the test ends, for two minutes at most.
func oneReplica(t *testing.T, name string) (context.Context, *loopback.Plane) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	plane, err := loopback.Start(ctx, t.TempDir(), loopback.Shape{Name: name, Replicas: 1, Ready: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := plane.Stop(); err != nil {
			t.Error(err)
		}
	})
	return ctx, plane
}

// dynamicOf is a client of a cluster, and the kubeconfig of its administrator.
func dynamicOf(t *testing.T, plane *loopback.Plane) (cluster dynamic.Interface, kubeconfig string) {
	t.Helper()
	cluster, err := dynamic.NewForConfig(plane.Configs[0])
	if err == nil {
		kubeconfig, err = filepath.Abs(plane.Founded.Kubeconfig)
	}
	if err != nil {
		t.Fatal(err)
	}
	return cluster, kubeconfig
}

// withKubeconfig runs a verb of a cluster with a kubeconfig, and returns what it wrote, and what it said last.
func withKubeconfig(t *testing.T, path string, args ...string) (string, error) {
	t.Helper()
	flags := genericclioptions.NewConfigFlags(false)
	cache := t.TempDir()
	flags.KubeConfig, flags.CacheDir = &path, &cache
	var out bytes.Buffer
	f, streams := cmdutil.NewFactory(flags), genericiooptions.IOStreams{Out: &out, ErrOut: &out}
	root := &cobra.Command{Use: "kctl", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(rotateCommand(f, streams), renewCommand(f, streams), certsCommand(f, streams),
		gatewayCommand(f, streams), snapshotCommand(f, streams))
	root.SetArgs(args)
	c, err := root.ExecuteC()
	if err != nil {
		fmt.Fprintln(&out, commandErrorText(c, err))
	}
	return out.String(), err
}

// An administrator exchanges the cluster's CA: the kubeconfig in use gets both authorities and a certificate by the new one,
// and goes on after the former has gone, when it is renewed once more; one of before that was not renewed is refused. F51
func TestRenewKubeconfig(t *testing.T) {
	ctx, plane := oneReplica(t, "renew")
	first, err := os.ReadFile(plane.Founded.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	old, mine := filepath.Join(t.TempDir(), "old"), filepath.Join(t.TempDir(), "mine")
	for _, path := range []string{old, mine} {
		if err := os.WriteFile(path, first, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := func(want string, args ...string) {
		t.Helper()
		if out, err := withKubeconfig(t, mine, args...); err != nil || !strings.Contains(out, want) {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	var refused string
	err = wait.For(ctx, 100*time.Millisecond, func() error { // a new cluster has no feature level for a moment
		out, err := withKubeconfig(t, mine, "rotate", "cluster-ca", "--keep", "1h")
		if err != nil && strings.Contains(out, "the level rises automatically once every replica runs this release") {
			return err
		}
		if want := "kubeconfig renewed: authorities that context renew believes: 2; a new client certificate"; err !=
			nil || !strings.Contains(out, want) {
			refused = fmt.Sprintf("error %v, and no line with %q in\n%s", err, want, out)
		}
		return nil
	})
	if err != nil || refused != "" {
		t.Fatal(err, refused)
	}
	if a, b := holds(t, old), holds(t, mine); a.certificate == b.certificate || a.key == b.key {
		t.Error("the certificate or its key are those of before")
	}
	if info, err := os.Stat(mine); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	run("step wait, 3 of 5", "rotate", "--status")
	if out, err := withKubeconfig(t, old, "rotate", "--status"); err != nil {
		t.Errorf("the kubeconfig of before at the step wait: %v\n%s", err, out)
	}
	run("exchange of cluster-ca", "rotate", "--force")
	await.Until(ctx, t, await.Patience, 100*time.Millisecond, "the end of the rotation", func() error {
		out, err := withKubeconfig(t, mine, "rotate", "--status")
		if err == nil && !strings.Contains(out, "exchange of cluster-ca: done") {
			err = errors.New(out)
		}
		return err
	})
	run("believes: 1; a new client certificate", "renew")
	run("authority     cluster", "certs")
	if _, err := withKubeconfig(t, old, "renew"); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("renewing what is too old: %v", err)
	}
}

// holding is what a kubeconfig's only user shows.
type holding struct{ certificate, key string }

func holds(t *testing.T, path string) (out holding) {
	t.Helper()
	c, err := clientcmd.LoadFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range c.AuthInfos {
		out = holding{string(u.ClientCertificateData), string(u.ClientKeyData)}
	}
	return out
}
