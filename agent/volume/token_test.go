package volume

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// F38: a token belongs to the pod's only user and its fsGroup; other users cannot read it.
func TestTokenOwner(t *testing.T) {
	user, other, group := int64(1001), int64(1002), int64(4711)
	self := int64(os.Getuid())
	for _, c := range []struct {
		name      string
		pod       v1.PodSecurityContext
		container *int64
		want      string
	}{
		{"neither", v1.PodSecurityContext{}, nil, fmt.Sprintf("%d:%d 0644", self, os.Getgid())},
		{"fsGroup", v1.PodSecurityContext{FSGroup: &group}, nil, fmt.Sprintf("%d:4711 0640", self)},
		{"one user", v1.PodSecurityContext{RunAsUser: &user}, nil, fmt.Sprintf("1001:%d 0600", os.Getgid())},
		{"one user and fsGroup", v1.PodSecurityContext{RunAsUser: &user, FSGroup: &group}, nil, "1001:4711 0640"},
		{"two users", v1.PodSecurityContext{RunAsUser: &user}, &other, fmt.Sprintf("%d:%d 0644", self, os.Getgid())},
		{"two users and fsGroup", v1.PodSecurityContext{RunAsUser: &user, FSGroup: &group}, &other,
			fmt.Sprintf("%d:4711 0640", self)},
	} {
		t.Run(c.name, func(t *testing.T) {
			v, cluster, _ := newVolumes(t)
			p := newPodOfEveryKind(cluster)
			p.Spec.SecurityContext = &c.pod
			if c.container != nil {
				p.Spec.Containers = append(p.Spec.Containers,
					v1.Container{Name: "other", SecurityContext: &v1.SecurityContext{RunAsUser: c.container}})
			}
			m, err := v.MountAll(t.Context(), p)
			requireNoError(t, err)
			st, err := os.Stat(filepath.Join(m["api"].HostPath, "token"))
			requireNoError(t, err)
			owner := st.Sys().(*syscall.Stat_t)
			if got := fmt.Sprintf("%d:%d %04o", owner.Uid, owner.Gid, st.Mode().Perm()); got != c.want {
				t.Errorf("the token is %s, want %s", got, c.want)
			}
			requireNoError(t, v.UnmountAll(t.Context(), "u1"))
		})
	}
}
