package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/datadir"
)

// A replica without a configured address uses its last address: the address in the list of members,
// or else the address of Init or Join.
func TestPreviousAddress(t *testing.T) {
	for _, c := range []struct {
		name           string
		given          string
		members, first string // contents of the files
		want, wrong    string
	}{
		{name: "configured address", given: "192.0.2.1", members: `{"cp1": "192.0.2.2:6445"}`,
			first: `{"address": "192.0.2.3"}`,
			want:  "192.0.2.1"},
		{name: "member", members: `{"cp1": "192.0.2.2:6445", "cp2": "192.0.2.9:6445"}`,
			first: `{"address": "192.0.2.3"}`, want: "192.0.2.2"},
		{name: "member with an IPv6 address", members: `{"cp1": "[2001:db8::1]:6445"}`, want: "2001:db8::1"},
		{name: "not a member yet", members: `{"cp2": "192.0.2.9:6445"}`,
			first: `{"address": "192.0.2.3", "of a later release": 1}`, want: "192.0.2.3"},
		{name: "after init", first: `{"address": "192.0.2.3"}`, want: "192.0.2.3"},
		{name: "created by a release without address files", want: "", wrong: "--advertise-address"},
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
			got, err := conf.withAddress()
			if err == nil {
				err = got.checkSettings()
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
