package volume

import (
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/agent/volume/iscsi"
)

// Pods of a node that use the same iSCSI target share its session, which the first of them created.
// An inline volume may use the session only with the same credentials. A PersistentVolume may
// always use it, because an administrator chose its target.

// hashRounds is the number of hash iterations for credentials. The cost prevents someone with
// access to the record from trying many passwords.
const hashRounds = 20_000

// hashLogin returns a salted hash of iSCSI credentials, which may be empty.
func hashLogin(l iscsi.Login) (string, error) {
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return "", fmt.Errorf("hash of iSCSI credentials: %w", err)
	}
	return hashWith(l, salt)
}

func hashWith(l iscsi.Login, salt []byte) (string, error) {
	text, err := json.Marshal(l)
	if err != nil {
		return "", fmt.Errorf("hash of iSCSI credentials: %w", err)
	}
	key, err := pbkdf2.Key(sha256.New, string(text), salt, hashRounds, sha256.Size)
	if err != nil {
		return "", fmt.Errorf("hash of iSCSI credentials: %w", err)
	}
	return hex.EncodeToString(salt) + ":" + hex.EncodeToString(key), nil
}

// matchesLogin reports whether hash is the hash of the credentials l. An empty hash, which earlier
// agents recorded, matches all credentials.
func matchesLogin(hash string, l iscsi.Login) bool {
	if hash == "" {
		return true
	}
	text, _, _ := strings.Cut(hash, ":")
	salt, err := hex.DecodeString(text)
	if err != nil {
		return false
	}
	own, err := hashWith(l, salt)
	return err == nil && subtle.ConstantTimeCompare([]byte(own), []byte(hash)) == 1
}

// checkISCSICredentials sets the hash of the pod's credentials in the record r. For an inline
// volume it returns an error if the session with the target on this node belongs to pods with other
// credentials. file is the path of r.
func (v *iscsiVolumes) checkISCSICredentials(s iscsiSource, file string, r *iscsiRecord) error {
	login, err := v.iscsiLogin(s)
	if err != nil {
		if s.pvName != "" {
			return nil // an existing session is used without the secret
		}
		return err
	}
	if r.Secret, err = hashLogin(login); err != nil || s.pvName != "" {
		return err
	}
	others, err := v.iscsiRecordsOfTarget(file, *r)
	if err != nil {
		return err
	}
	// A pod with a failed login has no session, and must not block others. After a crash, the
	// record of the pod that logged in may lack LoggedIn.
	certain := false
	for _, o := range others {
		certain = certain || o.LoggedIn
	}
	if !certain && !v.hasISCSIDevice(s) {
		return nil
	}
	holder := ""
	for other, o := range others {
		if certain && !o.LoggedIn {
			continue
		}
		if matchesLogin(o.Secret, login) {
			return nil
		}
		holder = filepath.Base(filepath.Dir(filepath.Dir(other)))
	}
	if holder == "" {
		return nil // no pod of this node created the session
	}
	return fmt.Errorf("iSCSI target %s is in use on this node by pod %s with other credentials (chapAuthSession, "+
		"chapAuthDiscovery, secretRef): "+
		"name the same credentials, or place the pod on another node", r.Target, holder)
}

// hasISCSIDevice reports whether the kernel of this node has a device for the disk.
func (v *iscsiVolumes) hasISCSIDevice(s iscsiSource) bool {
	has, err := v.cfg.ISCSI.HasDisk(s.disk)
	return err == nil && has
}
