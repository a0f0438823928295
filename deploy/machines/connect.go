package machines

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/crypto/ssh/knownhosts"
)

// Bounds of a connection.
const (
	connectLimit = 20 * time.Second // until a machine answers at all
	dialLimit    = time.Minute      // until it has proved who it is and let us in, which takes a busy one its time
	aliveEvery   = 15 * time.Second // how often a machine is asked whether it is still there
	aliveWithin  = time.Minute      // how long it has to answer
)

// Machine is a host that is connected. Several may run commands on it at once.
type Machine struct {
	Host   Host
	client *ssh.Client
	done   chan struct{}
	close  sync.Once
}

// Dial reaches a machine by ssh. It is an error when the machine does not prove to be the one that is known by this name, takes
// none of the keys, does not answer in 20 seconds or does not come to the point in a minute; each says what to do.
func Dial(ctx context.Context, h Host) (*Machine, error) {
	m, err := dial(ctx, h)
	if err != nil {
		return nil, fmt.Errorf("reaching %s as %s@%s: %w", h.Name, h.SSH.User, target(h), err)
	}
	return m, nil
}

func target(h Host) string { return net.JoinHostPort(h.SSH.Address, strconv.Itoa(h.SSH.Port)) }

func dial(ctx context.Context, h Host) (*Machine, error) {
	check, algorithms, err := hostKey(h)
	if err != nil {
		return nil, err
	}
	auth, closeAgent, err := keys(h)
	if err != nil {
		return nil, err
	}
	defer closeAgent()
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	d := net.Dialer{Timeout: connectLimit}
	conn, err := d.DialContext(ctx, "tcp", target(h))
	if err != nil {
		return nil, err
	}
	// The handshake knows no context: a machine that says nothing is hung up on.
	over := context.AfterFunc(ctx, func() { conn.Close() })
	c, channels, requests, err := ssh.NewClientConn(conn, target(h), &ssh.ClientConfig{
		User: h.SSH.User, Auth: auth, HostKeyCallback: check, HostKeyAlgorithms: algorithms, ClientVersion: "SSH-2.0-keelson",
	})
	if !over() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("no answer that ssh understands within %v: %w", dialLimit, ctx.Err())
		}
		if strings.Contains(err.Error(), "unable to authenticate") {
			return nil, fmt.Errorf("it takes none of our keys: put a public key of yours into ~/.ssh/authorized_keys of %s there, or name the private one with ssh.key: %w", h.SSH.User, err)
		}
		return nil, err
	}
	m := &Machine{Host: h, client: ssh.NewClient(c, channels, requests), done: make(chan struct{})}
	go m.stayAlive()
	return m, nil
}

// Close ends the connection, and whatever still runs by it.
func (m *Machine) Close() error {
	m.close.Do(func() { close(m.done) })
	return m.client.Close()
}

// stayAlive hangs up on a machine that does not answer any more, so that nobody waits for it.
func (m *Machine) stayAlive() {
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	for {
		select {
		case <-m.done:
			return
		case <-tick.C:
		}
		answered := make(chan error, 1)
		go func() {
			_, _, err := m.client.SendRequest("keepalive@openssh.com", true, nil)
			answered <- err
		}()
		select {
		case err := <-answered:
			if err != nil {
				return
			}
		case <-m.done:
			return
		case <-time.After(aliveWithin):
			m.client.Close()
			return
		}
	}
}

// hostKey judges what a machine proves, and says by which sorts of keys it is known: another sort would look like another machine.
func hostKey(h Host) (ssh.HostKeyCallback, []string, error) {
	if h.SSH.HostKey != "" {
		want, _, _, _, err := ssh.ParseAuthorizedKey([]byte(h.SSH.HostKey))
		if err != nil {
			return nil, nil, fmt.Errorf("ssh.hostKey: want a line as in /etc/ssh/ssh_host_ed25519_key.pub: %w", err)
		}
		return func(_ string, _ net.Addr, is ssh.PublicKey) error {
			if string(is.Marshal()) != string(want.Marshal()) {
				return fmt.Errorf("it proves to have the key %s, and ssh.hostKey is %s: this is another machine, or it was installed anew",
					ssh.FingerprintSHA256(is), ssh.FingerprintSHA256(want))
			}
			return nil
		}, signatures(want.Type()), nil
	}
	known, err := knownhosts.New(h.SSH.KnownHosts)
	if errors.Is(err, fs.ErrNotExist) {
		known, err = func(string, net.Addr, ssh.PublicKey) error { return &knownhosts.KeyError{} }, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("known hosts: %w", err)
	}
	check := func(name string, remote net.Addr, is ssh.PublicKey) error {
		err := known(name, remote, is)
		var differs *knownhosts.KeyError
		if !errors.As(err, &differs) {
			return err
		}
		if len(differs.Want) == 0 {
			return fmt.Errorf("it is not in %s: compare its fingerprint %s, then run 'ssh -p %d %s@%s' once, or give its public key as ssh.hostKey",
				h.SSH.KnownHosts, ssh.FingerprintSHA256(is), h.SSH.Port, h.SSH.User, h.SSH.Address)
		}
		return fmt.Errorf("ITS KEY HAS CHANGED: it proves %s, and line %d of %s has %s: somebody may be in between, or it was installed anew; "+
			"if it was, 'ssh-keygen -R' forgets the old key", ssh.FingerprintSHA256(is), differs.Want[0].Line, differs.Want[0].Filename, ssh.FingerprintSHA256(differs.Want[0].Key))
	}
	// Asked with a key that nobody has, the file says which it knows.
	var differs *knownhosts.KeyError
	var sorts []string
	if errors.As(known(target(h), &net.TCPAddr{}, unknownKey{}), &differs) {
		for _, k := range differs.Want {
			for _, s := range signatures(k.Key.Type()) {
				if !slices.Contains(sorts, s) {
					sorts = append(sorts, s)
				}
			}
		}
	}
	return check, sorts, nil
}

// signatures are the algorithms of a sort of key.
func signatures(sort string) []string {
	if sort == ssh.KeyAlgoRSA {
		return []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
	}
	return []string{sort}
}

// unknownKey is a public key that no machine has.
type unknownKey struct{}

func (unknownKey) Type() string                        { return "none" }
func (unknownKey) Marshal() []byte                     { return []byte("none") }
func (unknownKey) Verify([]byte, *ssh.Signature) error { return errors.New("nobody signs with it") }

// keys are those that we prove who we are with.
func keys(h Host) ([]ssh.AuthMethod, func(), error) {
	if h.SSH.Key != "" {
		one, err := privateKey(h.SSH.Key)
		if err != nil {
			return nil, nil, err
		}
		return []ssh.AuthMethod{ssh.PublicKeys(one)}, func() {}, nil
	}
	var auth []ssh.AuthMethod
	closeAgent := func() {}
	if socket := os.Getenv("SSH_AUTH_SOCK"); socket != "" {
		if conn, err := net.DialTimeout("unix", socket, 2*time.Second); err == nil {
			conn.SetDeadline(time.Now().Add(dialLimit))
			closeAgent = func() { conn.Close() }
			auth = append(auth, ssh.PublicKeysCallback(agent.NewClient(conn).Signers))
		}
	}
	home, err := os.UserHomeDir()
	if err == nil {
		var own []ssh.Signer
		for _, name := range []string{"id_ed25519", "id_ecdsa", "id_rsa"} {
			if one, err := privateKey(filepath.Join(home, ".ssh", name)); err == nil { // one with a passphrase is the agent's
				own = append(own, one)
			}
		}
		if len(own) > 0 {
			auth = append(auth, ssh.PublicKeys(own...))
		}
	}
	if len(auth) == 0 {
		return nil, nil, errors.New("there is no key: start an ssh agent, make one with ssh-keygen, or name one with ssh.key")
	}
	return auth, closeAgent, nil
}

func privateKey(path string) (ssh.Signer, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("ssh.key: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > 1<<16 {
		return nil, fmt.Errorf("ssh.key: %s is no file with a private key", path)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("ssh.key: %w", err)
	}
	one, err := ssh.ParsePrivateKey(raw)
	var locked *ssh.PassphraseMissingError
	if errors.As(err, &locked) {
		return nil, fmt.Errorf("ssh.key: %s has a passphrase: add it to an ssh agent with ssh-add, and leave ssh.key out", path)
	}
	if err != nil {
		return nil, fmt.Errorf("ssh.key: %s: %w", path, err)
	}
	return one, nil
}

// fingerprint is a short name of bytes that are compared.
func fingerprint(raw []byte) string {
	sum := sha256.Sum256(raw)
	return base64.RawStdEncoding.EncodeToString(sum[:])
}
