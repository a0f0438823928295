package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/datadir"
)

// A replica that is given no address has the one of last time: the group's list says it, and before there is one what Init or
// Join was given.
func TestAddressOfLastTime(t *testing.T) {
	for _, c := range []struct {
		name           string
		given          string
		members, first string // what the files say
		want, wrong    string
	}{
		{name: "given", given: "192.0.2.1", members: `{"cp1": "192.0.2.2:6445"}`, first: `{"address": "192.0.2.3"}`, want: "192.0.2.1"},
		{name: "a member", members: `{"cp1": "192.0.2.2:6445", "cp2": "192.0.2.9:6445"}`, first: `{"address": "192.0.2.3"}`, want: "192.0.2.2"},
		{name: "a member of IPv6", members: `{"cp1": "[2001:db8::1]:6445"}`, want: "2001:db8::1"},
		{name: "no member yet", members: `{"cp2": "192.0.2.9:6445"}`, first: `{"address": "192.0.2.3", "of a later release": 1}`, want: "192.0.2.3"},
		{name: "just made", first: `{"address": "192.0.2.3"}`, want: "192.0.2.3"},
		{name: "made by a release that kept none", want: "", wrong: "--advertise-address"},
		{name: "damaged", first: `{"addr`, wrong: datadir.AddressFile},
	} {
		t.Run(c.name, func(t *testing.T) {
			conf := Config{Name: "cp1", DataDir: t.TempDir(), Advertise: c.given}
			for name, text := range map[string]string{datadir.MembersFile: c.members, datadir.AddressFile: c.first} {
				if text == "" {
					continue
				}
				if err := os.WriteFile(filepath.Join(conf.DataDir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := conf.addressed()
			if err == nil {
				err = got.check()
			}
			if c.wrong != "" {
				if err == nil || !strings.Contains(err.Error(), c.wrong) {
					t.Errorf("%v, want %s", err, c.wrong)
				}
			} else if err != nil || got.Advertise != c.want {
				t.Errorf("%q, %v, want %q", got.Advertise, err, c.want)
			}
		})
	}
}

// A replica that has joined runs by its folder alone, before the group has taken it in and afterwards.
func TestRunAfterJoin(t *testing.T) {
	p := newPlane(t, 1, nil)
	c := p.config(2)
	p.join(c)
	for range 2 {
		bare := c
		bare.Advertise = ""
		p.start(bare)
		p.members[c.Name].cfg = c // the test's own clients ask there
		p.ready(c.Name)
		p.stop(c.Name)
	}
}
