package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// restored restores a backup over the data of a replica, which is started again.
func (p *plane) restored(name, file string) {
	p.t.Helper()
	p.stop(name)
	if _, err := Restore(p.members[name].cfg, file, RestoreOptions{Replace: true}); err != nil {
		p.t.Fatal(err)
	}
	p.again(name)
	p.ready(name)
}

// One backup is restored after another, the older after the younger and one twice: no revision is handed out a second time,
// and what clients hold of the time between is 410, not the beginning of a silence.
func TestRestoresInARow(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.put("cp1", "a")
	older := p.backup("cp1")
	p.put("cp1", "b")
	younger := p.backup("cp1")
	seen := uint64(0)
	for i, file := range []string{younger, older, older, younger} {
		p.restored("cp1", file)
		if held := strconv.FormatUint(seen, 10); seen > 0 {
			w, err := p.client("cp1").CoreV1().ConfigMaps("default").Watch(context.Background(), metav1.ListOptions{ResourceVersion: held})
			if err == nil {
				e := <-w.ResultChan()
				w.Stop()
				err = apierrors.FromObject(e.Object)
			}
			if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
				t.Errorf("restore %d: a watch from what a client held of the time before: %v, want 410", i, err)
			}
		}
		for n := range 20 {
			rev, err := strconv.ParseUint(p.put("cp1", fmt.Sprint("c-", n)).ResourceVersion, 10, 63)
			if err != nil || n == 0 && rev <= seen {
				t.Errorf("restore %d: a write has revision %d, error %v; %d was handed out before it", i, rev, err, seen)
			}
			seen = max(seen, rev)
		}
	}
}

// Nothing is restored beside replicas that run: the cluster would be there twice, with the same keys.
func TestRestoreWhileOthersAnswer(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.put("cp1", "a")
	file := p.backup("cp1")
	p.stop("cp1")
	cfg := p.members["cp1"].cfg
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	members, err := cfg.members()
	if err != nil {
		t.Fatal(err)
	}
	members["cp2"] = l.Addr().String()
	if err := writeJSON(filepath.Join(cfg.DataDir, membersFile), members); err != nil {
		t.Fatal(err)
	}
	r, err := Restore(cfg, file, RestoreOptions{Replace: true})
	if !errors.Is(err, ErrOthersRun) || !strings.Contains(err.Error(), "cp2") || r.Moved != "" {
		t.Errorf("while cp2 answers: %v, moved %q", err, r.Moved)
	}
	if _, err := Restore(cfg, file, RestoreOptions{Replace: true, Beside: true}); err != nil {
		t.Errorf("where cp2 is to be left behind: %v", err)
	}
	if err := writeJSON(filepath.Join(cfg.DataDir, membersFile), members); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := Restore(cfg, file, RestoreOptions{Replace: true}); err != nil {
		t.Errorf("when cp2 is stopped: %v", err)
	}
	p.again("cp1")
	p.holds("cp1", "a")
}
